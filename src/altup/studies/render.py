"""A study's table as text: Markdown for documents, CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from altup.studies.comparison import NOT_RUN, compare, measures_shown, show_pair
from altup.studies.evidence import Evidence
from altup.studies.metrics import METRICS
from altup.studies.study import Study

FORMATS = ("markdown", "csv")


def render_table(study: Study, evidence: Evidence, form: str) -> str:
    """Every row of the paper's table and of ours."""
    rows = compare(study, evidence)
    shown = measures_shown(rows, study)
    has_paper = {m: any(row.cells[m].paper is not None for row in rows) for m in shown}
    head = ["model"]
    for m in shown:
        title = METRICS[m].head
        head += [f"{title}, paper"] if has_paper[m] else []
        head.append(f"{title}, ours")
    body = []
    for row in rows:
        cells = [row.name]
        for m in shown:
            theirs, ours = show_pair(row.cells[m], m)
            cells += [theirs] if has_paper[m] else []
            cells.append(ours or (NOT_RUN if not row.run and m == shown[0] else "–"))
        body.append(cells)
    return (
        _csv(head, body) if form == "csv" else f"### {study.title}\n\n{study.question}\n\n" + _markdown(head, body)
    )


def render_claims(study: Study, evidence: Evidence) -> str:
    """What became of the paper's claims, as a list."""
    sizes = [size for row in study.rows for size in evidence.sizes(study.name, row.label)]
    lines = []
    for verdict in evidence.verdicts(study, list(dict.fromkeys(sizes)) or ["–"]):
        claim, d = verdict.expectation, verdict.difference
        form = METRICS[claim.metric]
        number = ""
        if d is not None:
            error = f" ± {form.show(d.error)}" if d.error is not None else ""
            number = f": {d.mean:+.{form.digits}f}{error} {form.unit} ({verdict.size})".replace("-", "−")
        lines.append(f"- {claim.better} better than {claim.than} in {form.title}{number} – **{verdict.word}**")
    return "\n".join(lines) + ("\n" if lines else "")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def _csv(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()
