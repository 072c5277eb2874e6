"""Tables: the paper's numbers beside ours, whatever form they have, and the outcome of claims in words."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from altup.studies.results import Record, ResultFolders
from altup.studies.study import shipped
from altup.studies.tables import Cell, Column, Table, judge_claims, study_table, sweep_table
from tests.studies.samples import NOTHING, SEEDS, TWO, record, result, statistics

VARYING = shipped()["varying-k"]


def rows_of(table: Table) -> dict[str, list[Cell]]:
    return {str(row[0].text): list(row[1:]) for row in table.rows}


def test_a_table_has_the_papers_rows_and_ours() -> None:
    """Small has both; base and large are the paper's alone, and a size of ours stands below them."""
    tiny = [result("Dense", 12.0, "0", size="tiny")]
    table = study_table(VARYING, statistics([*SEEDS, *tiny]), NOTHING)
    rows = rows_of(table)
    assert len(rows) == 9 + 1
    assert [column.name for column in table.columns[:4]] == ["model", "seeds", "paper", "ours"]
    small = rows["small · AltUp K=2"]
    assert [cell.text for cell in small[:3]] == ["2", "61.86", "43.00 ± 1.00"]
    assert [cell.below for cell in small[:3]] == ["", "+0.65", "+2.50 ± 1.12"]
    assert rows["large · AltUp K=4"][2].text == "not run at this scale"
    assert [cell.text for cell in rows["tiny · Dense"][:3]] == ["1", "", "12.00"]
    assert "Scale mini, text text." in table.caption
    alone = study_table(VARYING, statistics(SEEDS), NOTHING, run_alone=True)
    assert list(rows_of(alone)) == ["small · Dense", "small · AltUp K=2", "small · AltUp K=4"]


def test_parameters_are_counted_where_nothing_was_run() -> None:
    """Where the paper gives small 32.9 M of embeddings, dense, we count as many, to its digits."""
    table = study_table(shipped()["parameters-and-speed"], statistics([]), NOTHING)
    groups = [column.group for column in table.columns]
    at = groups.index("embedding parameters")
    paper, ours = (cell.value for cell in table.rows[0][at : at + 2])
    assert paper == 3.29e7
    assert ours == pytest.approx(paper, rel=0.01)


def test_what_is_not_alike_is_said_in_the_table() -> None:
    other = [
        result("AltUp K=2", 50.0, str(s), m, length="9 steps of 128") for s in (0, 1) for m in ("accuracy", "loss")
    ]
    dense = [result("Dense", 40.0, str(s), m) for s in (0, 1) for m in ("accuracy", "loss")]
    row = next(
        r
        for r in study_table(VARYING, statistics([*dense, *other]), NOTHING).rows
        if r[0].text == "small · AltUp K=2"
    )
    assert row[0].below == "not comparable with Dense: 9 steps of 128 against 2,000 steps of 128"
    assert row[3].below == ""


def test_runs_that_diverged_are_counted_beside_the_seeds() -> None:
    rows = rows_of(study_table(VARYING, statistics([*SEEDS, result("Dense", 5.0, "2", "diverged")]), NOTHING))
    assert rows["small · Dense"][0] == Cell("2", "1 diverged", 2)


def test_a_part_of_a_suite_is_said(tmp_path) -> None:
    def known(**tuned: object) -> ResultFolders:
        folders = ResultFolders([tmp_path])
        folders._records["r"] = record("r", kind="finetune", column="glue", **tuned)
        return folders

    glue = result("Dense", 70.0, metric="glue", run="r")
    some = known(tasks={"glue/cola": {}, "glue/sst2": {}}, missing=["glue/cola: 3 of 8"])
    caption = study_table(VARYING, statistics([glue]), some).caption
    assert "GLUE is the mean of cola, sst2 alone" in caption
    assert "a part of the examples (glue/cola: 3 of 8)" in caption


def test_every_form_has_the_same_numbers() -> None:
    table = study_table(VARYING, statistics(SEEDS), NOTHING, run_alone=True)
    lines = [line.split("|")[1:-1] for line in table.markdown().splitlines() if line.startswith("|")]
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        [c.strip() for c in line] for line in (lines[0], *lines[2:])
    ]
    for width in (60, 200):
        console = Console(width=width, file=io.StringIO())
        table.print(console)
        shown = console.file.getvalue()
        assert max(map(len, shown.splitlines())) <= width
        for row in table.rows:
            for cell in row[1:]:
                assert str(cell.text) in shown
                assert cell.below in shown


def judge(
    dense: list[float], altup: list[float], study: str = "varying-k", **changes: str
) -> tuple[str, str, str]:
    runs = [result("Dense", v, str(i), study=study, **changes) for i, v in enumerate(dense)]
    runs += [result("AltUp K=2", v, str(i), study=study, **changes) for i, v in enumerate(altup)]
    judged = judge_claims(TWO if study == "two" else shipped()[study], statistics(runs, study))[0]
    return judged.word, judged.why, judged.paper


FLAT, UP, DOWN = [40.0, 40.1, 39.9], [42.0, 42.1, 41.9], [38.0, 38.1, 37.9]


def test_only_what_the_paper_claims_is_reproduced() -> None:
    """It has +0.65 for small. A study of one's own has no such number, whatever comes out."""
    word, why, paper = judge(FLAT, UP)
    assert (word, why) == ("reproduces the paper", "95 % interval +1.77 to +2.23, 3 seeds each.")
    assert paper == "The paper: +0.65 (small), +0.54 (base), +0.19 (large)."
    assert judge(FLAT, DOWN)[0] == "contradicts the paper"
    assert judge(FLAT, [40.0, 40.1, 40.0])[:2] == (
        "no significant difference",
        "95 % interval −0.17 to +0.24, 3 seeds each; it includes zero.",
    )
    assert judge(FLAT[:1], UP) == ("one seed, no verdict", "3 seeds against 1: no interval.", paper)
    assert judge(FLAT, UP, "two") == (
        "better",
        "95 % interval +1.77 to +2.23, 3 seeds each.",
        "Not a claim of the paper.",
    )
    assert judge(FLAT, DOWN, "two")[0] == "worse"


def test_at_a_size_that_the_paper_has_not_its_sizes_must_agree() -> None:
    """SameUp is ahead of Sum at all of its sizes; AltUp ahead of SameUp at some and behind at others."""
    assert judge(FLAT, UP, size="tiny")[0] == "reproduces the paper"


def test_lower_is_better_where_it_is() -> None:
    runs = [result("Dense", v, str(i), "loss", study="recycled") for i, v in enumerate((3.0, 3.01, 2.99))]
    runs += [result("AltUp K=2", v, str(i), "loss", study="recycled") for i, v in enumerate((2.9, 2.91, 2.89))]
    judged = {
        (j.verdict.claim.better, j.verdict.claim.metric): j
        for j in judge_claims(shipped()["recycled"], statistics(runs, "recycled"))
    }
    loss = judged["AltUp K=2", "loss"]
    assert (loss.word, loss.number) == ("better", "−0.100 ± 0.008 nats a token")
    assert loss.why.endswith("lower is better.")


def test_what_a_sweep_chose_and_from_what(tmp_path) -> None:
    grid = {"lr": [0.1, 0.2, 0.4], "z_loss": [0.0, 0.1]}
    known: dict[str, Record] = {
        f"s{i}": record(f"s{i}", step=500, sweep={"key": "k", "model": "m", "point": {"lr": lr}, "grid": grid})
        for i, lr in enumerate(grid["lr"])
    }
    known["dense-0-accuracy"] = record("dense-0-accuracy", chosen={"lr": 0.4, "z_loss": 0.0}, sweep_key="k")
    folders = ResultFolders([tmp_path])
    for key, kept in known.items():
        from altup.studies.results import write_record

        write_record(tmp_path, {**kept, "key": key})
    table = sweep_table(VARYING, statistics(SEEDS), folders)
    assert table is not None
    (row,) = table.rows
    cells = [str(cell.text) for cell in row]
    assert cells == ["small · Dense", "3", "500", "lr 0.4 of 0.1, 0.2, 0.4; z_loss 0.0 of 0.0, 0.1", "lr, z_loss"]
    assert sweep_table(VARYING, statistics(SEEDS), NOTHING) is None


def test_heads_of_groups_span_their_columns() -> None:
    columns = [Column("a"), Column("b", "x"), Column("c", "x"), Column("d"), Column("e"), Column("f", "y")]
    assert Table(columns, []).groups == [("", 1), ("x", 2), ("", 1), ("", 1), ("y", 1)]
    assert Table(columns[:1], []).groups == []
