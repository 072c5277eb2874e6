"""The report of the studies: the paper's tables with our numbers beside them, pictures, and what was run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.files import atomic_write
from altup.core.text import number_of
from altup.studies import comparison
from altup.studies.claims import claims_table, sizes_run
from altup.studies.comparison import (
    TableRow,
    compare,
    compare_speedups,
    measures_shown,
    printed_speedups,
    show_pair,
    signed,
)
from altup.studies.evidence import ONE_SEED, Evidence, Verdict, choose_evidence
from altup.studies.metrics import METRICS, STATIC
from altup.studies.partial import partial_note
from altup.studies.report import (
    Cell,
    Column,
    Html,
    Plot,
    code,
    contents,
    data_table,
    facts,
    folded,
    grid,
    page,
    paragraph,
    save_plots,
    section,
)
from altup.studies.results import Result, read_results, read_run_record
from altup.studies.shared import with_shared
from altup.studies.study import Study, find_study, shipped
from altup.studies.study_plots import study_plots
from altup.studies.study_rule import rule_section

TITLE, OWN_TITLE = "AltUp: the paper's studies, run again", "AltUp: studies"


@dataclass(frozen=True)
class StudyReport:
    """Results of one scale from one or several folders, told by the studies named, or by all shipped ones."""

    folders: Sequence[Path]
    scale: str | None = None
    names: Sequence[str] = ()

    @cached_property
    def results(self) -> list[Result]:
        return list({r.identity: r for folder in self.folders for r in read_results(folder)}.values())

    @cached_property
    def chosen(self) -> Evidence:
        """What was run."""
        return choose_evidence(self.results, self.scale)

    @cached_property
    def evidence(self) -> Evidence:
        """The same, told by every study that has the model."""
        return with_shared(self.chosen, self.studies, self.record)

    @cached_property
    def studies(self) -> list[Study]:
        return [find_study(name) for name in self.names] or list(shipped().values())

    def record(self, key: str) -> dict[str, Any] | None:
        """What a run kept of itself, from the first folder that has it."""
        found = (read_run_record(folder, key) for folder in self.folders)
        return next((record for record in found if record), None)

    @cached_property
    def plots(self) -> dict[str, list[Plot]]:
        return {study.name: study_plots(study, self.evidence, self.record) for study in self.studies}

    def write(self, path: Path, plots: bool = True) -> None:
        """The page and, in a folder of its name beside it, every plot as SVG and PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rule, rule_plots = rule_section(self.studies, self.evidence, self.record)
        from_paper = any(study.table for study in self.studies)
        claims = "The paper's claims" if from_paper else "Claims"
        claimed = any(study.expect for study in self.studies)
        html = page(
            TITLE if from_paper else OWN_TITLE,
            paragraph(self._lead(), "lead"),
            paragraph(
                ("Every table of the paper stands below with our numbers beside it. " if not self.names else "")
                + "Differences are to the study's baseline at the same size, with the standard error of the "
                "difference after ±. “Reproduced” and “contradicted” mean that the 95 % interval excludes zero; "
                "the noise is pooled over the seeds of all models of that size."
            ),
            contents(
                [
                    *([("claims", claims)] if claimed else []),
                    *((study.name, study.title) for study in self.studies),
                    ("rule", "What the update rule learned"),
                    ("results", "What was run"),
                ]
            ),
            *([section(claims, claims_table(self.studies, self.evidence), name="claims")] if claimed else []),
            *(self._study(study) for study in self.studies),
            section("What the update rule learned", *rule, name="rule"),
            section("What was run", *self._provenance(), name="results"),
        )
        atomic_write(path, html)
        if plots:
            drawn = [plot for found in self.plots.values() for plot in found]
            save_plots([*drawn, *rule_plots], path.with_name(f"{path.stem}-plots"))

    def _lead(self) -> str:
        e = self.evidence
        runs = {r.run for r in e.results if r.seed}
        machines = sorted({r.hardware for r in e.results})
        verdicts = self._distinct_verdicts()
        words = ["with one seed and no verdict" if v.word == ONE_SEED else v.word for v in verdicts]
        counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        runs_told = f"{number_of(len(runs), 'run')} on {' and '.join(machines)}."
        return f"Scale {e.scale}: {runs_told}" + (f" Of {len(verdicts)} claims: {counted}." if verdicts else "")

    def _distinct_verdicts(self) -> list[Verdict]:
        """Studies share models: what the same runs say of the same claim counts once."""
        e = self.evidence
        found: dict[tuple[str, ...], Verdict] = {}
        for study in self.studies:
            for verdict in e.verdicts(study, sizes_run(study, e)):
                claim = verdict.expectation
                runs = [tuple(e.runs(study.name, label, verdict.size)) for label in (claim.better, claim.than)]
                # Claims that were not run have no runs to know them by.
                by = runs if verdict.difference else study.name
                found.setdefault((claim.better, claim.than, claim.metric, verdict.size, str(by)), verdict)
        return list(found.values())

    def runs_without_record(self) -> list[str]:
        """Keys of runs that have results, but whose curves, coefficients and config are gone."""
        runs = dict.fromkeys(r.run for r in self.chosen.results if r.seed)
        return [key for key in runs if self.record(key) is None]

    def _study(self, study: Study) -> Html:
        rows = compare(study, self.evidence)
        parts = [paragraph(study.question, "lead"), paragraph(f"The paper: {study.finding}")]
        if study.table is None:
            parts[-1] = paragraph(study.finding)
        parts.append(study_table(study, rows, partial_note(study, self.evidence, self.record)))
        if study.frontier:
            parts.append(speedup_table(study, self.evidence))
        if self.plots[study.name]:
            parts.append(grid(*(plot.figure() for plot in self.plots[study.name])))
        return section(study.title, *parts, name=study.name)

    def _provenance(self) -> list[Html]:
        e = self.chosen
        commands = sorted({r.command.split(" --only ")[0] for r in e.results})
        columns = [
            Column("study", text=True), Column("model", text=True), Column("size", text=True), Column("seed"),
            Column("measure", text=True), Column("value"), Column("unit", text=True), Column("step"),
            Column("run", text=True), Column("on", text=True), Column("date", text=True),
        ]  # fmt: skip
        rows = [
            [
                Cell(r.study), Cell(r.label), Cell(r.size), Cell(r.seed), Cell(METRICS[r.metric].title),
                Cell(METRICS[r.metric].show(r.value), value=r.value), Cell(r.unit), Cell(r.step), Cell(r.run),
                Cell(r.hardware), Cell(r.date),
            ]
            for r in e.results
        ]  # fmt: skip
        scales = sorted({r.scale for r in self.results})
        return [
            facts(
                [
                    (
                        "scale",
                        e.scale + (f" (also in the results: {', '.join(scales)})" if len(scales) > 1 else ""),
                    ),
                    ("text", f"prepared data {e.data}"),
                    ("hardware", ", ".join(sorted({r.hardware for r in e.results}))),
                    ("versions", "; ".join(sorted({r.versions for r in e.results}))),
                    ("report written", time.strftime("%Y-%m-%d %H:%M %Z")),
                ]
            ),
            paragraph("The commands; --only LABEL runs one model alone."),
            code("\n".join(commands)),
            folded(
                f"All {len(rows)} results",
                data_table(columns, rows, "One row a run and measure. Click a head to sort.", filters=True),
            ),
        ]


def study_table(study: Study, rows: Sequence[TableRow], note: str) -> Html:
    """For every measure the paper's number and ours, gains over the baseline below them."""
    shown = measures_shown(list(rows), study)
    has_paper = {m: any(row.cells[m].paper is not None for row in rows) for m in shown}
    columns = [Column("model", text=True)]
    for m in shown:
        head = METRICS[m].head
        columns += [Column("paper", head)] if has_paper[m] else []
        columns.append(Column("ours", head))
    body = []
    for row in rows:
        beyond = study.table is not None and not row.in_paper
        below = [row.size, *([number_of(row.seeds, "seed")] if row.seeds else [])]
        below += ["not in the paper's table"] if beyond else []
        cells = [Cell(row.label, below=", ".join(below))]
        for m in shown:
            pair = row.cells[m]
            theirs, ours = show_pair(pair, m)
            if has_paper[m]:
                cells.append(_split(theirs, pair.paper))
            if ours:
                cells.append(_split(ours, pair.ours.mean if pair.ours else None))
            else:
                once = not row.run and m == shown[0]
                cells.append(Cell(comparison.NOT_RUN, kind="absent told") if once else Cell("–", kind="absent"))
        body.append(cells)
    caption = f"Below a score: its difference to {study.baseline} of the same size."
    if any(m in STATIC for m in shown):
        caption += " Parameters and FLOPs of models that were not run are counted from their shape."
    if has_paper.get(comparison.SPEED):
        caption += " The paper's sequences a second are counted by the core of its accelerators."
    return data_table(columns, body, caption + note)


def _split(text: str, value: float | None) -> Cell:
    """`61.86 (+0.65)` as a number with its gain below."""
    number, bracket, gain = text.partition(" (")
    return Cell(number, gain.removesuffix(")") if bracket else "", value)


def speedup_table(study: Study, evidence: Evidence) -> Html:
    columns = [
        Column("model", text=True),
        Column("score", text=True),
        Column("paper", "speedup at equal score (%)"),
    ]
    columns += [Column(f"ours, {name}", "speedup at equal score (%)") for name in comparison.LATENCIES]
    columns.append(Column("printed numbers", "speedup at equal score (%)"))
    body = []
    entries = [(row, "") for row in compare_speedups(study, evidence)]
    entries += [(row, "printed") for row in printed_speedups()]
    for row, kind in entries:
        cells = [Cell(row.label, below=row.size), Cell(row.benchmark)]
        theirs = row.paper if kind != "printed" else None
        cells.append(Cell(f"{theirs:.0f}", value=theirs) if theirs is not None else Cell(""))
        for name in comparison.LATENCIES:
            value = row.ours.get(name, "")
            cells.append(
                Cell(signed(value, 0), value=value) if isinstance(value, float) else Cell(value, kind="absent")
            )
        printed = row.paper if kind == "printed" else None
        cells.append(Cell(signed(printed, 0), value=printed) if printed is not None else Cell(""))
        body.append(cells)
    return data_table(
        columns,
        body,
        "(latency of the dense model that would reach the score − latency) / latency, the dense model "
        "interpolated between those measured; where no two of them bracket the score there is no number, for "
        "nothing is extrapolated. “Printed numbers”: our arithmetic on the paper's scores and speeds of S, B, L.",
    )
