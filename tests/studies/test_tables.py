"""Tables: the paper's rows and ours, parameters that are counted, and what scores leave out."""

from __future__ import annotations

import pytest

from altup.studies.comparison import NOT_RUN, compare, paper_differences, show_pair
from altup.studies.results import Result
from altup.studies.statistics import Statistics, choose_results
from altup.studies.study import shipped
from altup.studies.tables import missing_note, text_claims, text_table
from tests.studies.samples import SEEDS, record, result

GLUE = ["glue/cola", "glue/sst2"]
TUNED = {
    "g0": record("g0", kind="finetune", column="glue", tasks={task: {} for task in GLUE}, missing=[]),
    "s0": record(
        "s0", kind="finetune", column="squad", tasks={"squad": {}}, missing=["squad: validation 9 of 10,570"]
    ),
}


def test_a_table_has_the_papers_rows_and_ours() -> None:
    stats = choose_results(SEEDS)
    rows = compare(shipped()["varying-k"], stats)
    assert [(row.size, row.label) for row in rows] == [
        (size, label) for size in ("small", "base", "large") for label in ("Dense", "AltUp K=2", "AltUp K=4")
    ]
    k2 = rows[1].cells["accuracy"]
    assert show_pair(k2, "accuracy") == ("61.86 (+0.65)", "43.00 ± 1.00 (+2.50 ± 1.12)")
    assert not rows[3].run
    text = text_table(shipped()["varying-k"], stats, "markdown")
    lines = text.splitlines()
    assert sum(NOT_RUN in line for line in lines) == 6
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert [line.split(" | ")[1] for line in lines if line.startswith("| small")] == ["2", "2", "1"]
    claims = text_claims(shipped()["varying-k"], stats).splitlines()
    assert "+2.50 ± 1.12 %, 95 % interval −4.4" in claims[0]
    assert claims[0].endswith("(small; 2 seeds) – **not visible**")
    assert claims[1].endswith("0.00 % (small; 1 seed against 2) – **one seed, no verdict**")


def test_the_papers_own_differences_stand_beside_ours() -> None:
    """AltUp K=2 over dense in the paper's table of small: 61.86 against 61.21 %."""
    differences = paper_differences(shipped()["varying-k"])
    assert differences["AltUp K=2", "Dense", "accuracy"]["small"] == pytest.approx(0.65)
    assert all(d > 0 for d in differences["AltUp K=4", "AltUp K=2", "accuracy"].values())


def test_parameters_are_counted_where_nothing_was_run() -> None:
    """The paper's 13 rows, against its own digits: our closed form without any run."""
    stats = Statistics("mini", "text", [])
    for name in ("parameters-and-speed", "dense-scaling"):
        for row in compare(shipped()[name], stats):
            for metric in ("embedding_params", "non_embedding_params"):
                pair = row.cells[metric]
                assert pair.ours is not None
                assert pair.ours.mean == pytest.approx(pair.paper, rel=6e-3)


def test_a_part_of_a_suite_is_told() -> None:
    results = [
        result("Dense", 40.0), result("Dense", 70.0, metric="glue", run="g0"),
        result("Dense", 50.0, metric="squad_f1", run="s0"),
    ]  # fmt: skip

    def told(results: list[Result]) -> str:
        return missing_note(shipped()["varying-k"], choose_results(results), TUNED.get)

    assert "GLUE is the mean of cola, sst2 alone" in told(results)
    assert "SQuAD counts a part of the examples (squad: validation 9 of 10,570)" in told(results)
    assert told(results[:1]) == ""
