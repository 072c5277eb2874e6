"""The paper's claims: its difference, ours, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from altup.studies.comparison import paper_numbers, signed
from altup.studies.evidence import Evidence, Verdict
from altup.studies.metrics import METRICS
from altup.studies.report import Cell, Column, Html, data_table
from altup.studies.study import Study


def sizes_run(study: Study, evidence: Evidence) -> list[str]:
    """The sizes at which anything of the study was run."""
    found = [size for row in study.rows for size in evidence.sizes(study.name, row.label)]
    return list(dict.fromkeys(found)) or ["–"]


def claims_table(studies: Sequence[Study], evidence: Evidence) -> Html:
    """Each claim with the paper's difference and ours."""
    columns = [
        Column("study", text=True), Column("claim", text=True), Column("size", text=True),
        Column("paper's difference"), Column("ours"), Column("verdict", text=True),
    ]  # fmt: skip
    rows = []
    for study in studies:
        theirs = paper_differences(study)
        for verdict in evidence.verdicts(study, sizes_run(study, evidence)):
            rows.append(_claim(study, verdict, theirs))
    return data_table(
        columns,
        rows,
        "± is the standard error. A claim needs two seeds of some model to be judged; one seed shows a "
        "difference, but not whether it is more than noise.",
    )


def _claim(study: Study, verdict: Verdict, theirs: Mapping[tuple[str, str, str], dict[str, float]]) -> list[Cell]:
    claim, d = verdict.expectation, verdict.difference
    metric = METRICS[claim.metric]
    known = theirs.get((claim.better, claim.than, claim.metric), {})
    told = known.get(verdict.size) if d is not None else None
    if told is not None:
        paper = Cell(signed(told, metric.digits), value=told)
    elif known:
        low, high = min(known.values()), max(known.values())
        paper = Cell(
            signed(low, metric.digits) + (f" to {signed(high, metric.digits)}" if high != low else ""),
            below=", ".join(known), value=low,
        )  # fmt: skip
    else:
        paper = Cell("not in the paper", kind="absent")
    ours = Cell("")
    if d is not None:
        error = f" ± {metric.show(d.error)}" if d.error is not None else ""
        ours = Cell(signed(d.mean, metric.digits) + error, value=d.mean)
    kind = verdict.word if verdict.word in ("reproduced", "contradicted") else "absent"
    size = verdict.size if d is not None else ""
    told_claim = Cell(f"{claim.better} better than {claim.than}", below=f"{metric.title}, {metric.unit}")
    return [Cell(study.title), told_claim, Cell(size), paper, ours, Cell(verdict.word, kind=kind)]


def paper_differences(study: Study) -> dict[tuple[str, str, str], dict[str, float]]:
    """(better, than, measure) → size → the difference that the paper's table shows."""
    numbers = paper_numbers(study)
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for claim in study.expect:
        for size in dict.fromkeys(size for size, _ in numbers):
            one = numbers.get((size, claim.better), {}).get(claim.metric)
            other = numbers.get((size, claim.than), {}).get(claim.metric)
            if one is not None and other is not None:
                found.setdefault((claim.better, claim.than, claim.metric), {})[size] = one - other
    return found
