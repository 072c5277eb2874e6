"""The report of studies: failures and claims first, then each study's table beside the paper's, and what was
run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from altup.core.errors import UserError
from altup.core.files import SVG, atomic_write, refuse_foreign
from altup.core.text import number_of
from altup.studies.charts import interval_chart
from altup.studies.figures import coefficient_figures, study_figures
from altup.studies.pages import Figure, render, standalone_svg, title_mark
from altup.studies.results import Result, ResultFolders
from altup.studies.statistics import (
    BETTER,
    NOT_COMPARABLE,
    NOT_RUN,
    NOT_SIGNIFICANT,
    ONE_SEED,
    WORSE,
    Statistics,
    check_scale,
    choose_results,
)
from altup.studies.study import METRICS, Study, find_study, shipped
from altup.studies.tables import (
    Judged,
    Table,
    judge_claims,
    results_table,
    speedup_table,
    study_table,
    sweep_table,
)

if TYPE_CHECKING:
    from altup.core.terminal import Console

ORDER = (WORSE, BETTER, NOT_SIGNIFICANT, NOT_COMPARABLE, ONE_SEED, NOT_RUN)
KINDS = {BETTER: "better", WORSE: "worse", NOT_SIGNIFICANT: "open", NOT_COMPARABLE: "open"}
MOST_CARDS = 20  # before the others fold: a page that a phone scrolls through
TITLE = "AltUp: studies"


@dataclass(frozen=True)
class Card:
    """A claim as the page shows it, with the names and titles of the studies that make it."""

    judged: Judged
    studies: list[tuple[str, str]]

    @property
    def kind(self) -> str:
        """The class of its style."""
        return KINDS.get(self.judged.verdict.word, "small")

    @property
    def picture(self) -> Markup:
        d = self.judged.verdict.difference
        if d is None or d.low is None or d.high is None:
            return Markup("")
        higher = bool(METRICS[self.judged.verdict.claim.metric].higher)
        return interval_chart(d.mean, d.low, d.high, self.judged.of_paper, higher)


@dataclass(frozen=True)
class Continuation:
    """The first half of a sentence that no model has seen, how it ends, and how each model would end it."""

    begin: str
    truth: str
    by_model: dict[str, str]


@dataclass(frozen=True)
class StudyReport:
    """The results in one or several folders, as the studies named or `given` show them, or all shipped ones."""

    folders: Sequence[Path]
    scale: str | None = None
    names: Sequence[str] = ()
    given: Sequence[Study] = ()
    title: str = TITLE  # by which a report is known
    known: ResultFolders = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", ResultFolders(self.folders))

    @property
    def results(self) -> list[Result]:
        return self.known.results

    @cached_property
    def studies(self) -> list[tuple[Study, Statistics]]:
        """Every study with its results: of the scale that was asked for, or of the one it has most results of."""
        check_scale(self.results, self.scale)
        studies = [*self.given, *(find_study(name) for name in self.names)] or list(shipped().values())
        return [(study, choose_results(self.results, study.name, self.scale)) for study in studies]

    @cached_property
    def run(self) -> list[tuple[Study, Statistics]]:
        return [(study, stats) for study, stats in self.studies if stats.results]

    @property
    def not_run(self) -> list[Study]:
        return [study for study, stats in self.studies if not stats.results]

    def tables(self, study: Study, stats: Statistics, run_alone: bool = False) -> list[Table]:
        """A study's table, its speedups and its sweeps."""
        found = [study_table(study, stats, self.known, run_alone)]
        found += [speedup_table(study, stats)] if study.frontier else []
        swept = sweep_table(study, stats, self.known)
        return [*found, swept] if swept else found

    @cached_property
    def cards(self) -> list[Card]:
        """Every claim once, whichever studies make it, in the order of the verdicts."""
        found: dict[str, Card] = {}
        for study, stats in self.studies:
            for judged in judge_claims(study, stats):
                verdict = judged.verdict
                runs = [
                    stats.runs(study.name, label, verdict.size)
                    for label in (verdict.claim.better, verdict.claim.than)
                ]
                place = str((verdict.claim, verdict.size, runs if verdict.difference else study.name))
                found.setdefault(place, Card(judged, [])).studies.append((study.name, study.title))
        return sorted(found.values(), key=lambda card: ORDER.index(card.judged.verdict.word))

    def problems(self) -> list[str]:
        """What went wrong: jobs that failed, and runs that diverged."""
        failed = [f"failed: {job['title']}: {job['reason']}" for job in self.known.failures()]
        named = {r.run for _, stats in self.run for r in stats.results}
        diverged = [record for record in self.known.records() if "diverged" in record and record["key"] in named]
        return failed + [f"diverged at step {r['step']:,}: {r['title']}: {r['diverged']}" for r in diverged]

    def print(self, console: Console, form: str = "table") -> None:
        """Every study that was run: its tables and the outcome of its claims, for a terminal or in Markdown;
        `csv` is its table alone."""
        for study, stats in self.run:
            tables, claims = self.tables(study, stats, run_alone=form == "table"), judge_claims(study, stats)
            if form == "csv":
                console.out(tables[0].csv(), highlight=False)
            elif form == "markdown":
                parts = [f"### {study.title}\n\n{study.question}\n", *(table.markdown() for table in tables)]
                console.out("\n".join([*parts, *(f"- {claim.line}" for claim in claims)]) + "\n", highlight=False)
            else:
                console.print(f"{study.title}\n{study.question}\n", markup=False)
                for table in tables:
                    table.print(console)
                console.print("\n".join(f"• {claim.line}" for claim in claims) + "\n", markup=False)

    def write(self, path: Path, plots: bool = True, continued: Sequence[Continuation] = ()) -> None:
        """The page and, in a folder of its name beside it, every chart as SVG; `continued` are sentences that the
        models have ended. What is none of ours is not overwritten."""
        refuse_foreign(path, [title_mark(self.title)], "a report of studies")
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {study.name: study_figures(study, stats, self.known.record) for study, stats in self.studies}
        sections = [self._section(study, stats, figures[study.name]) for study, stats in self.run]
        page = render(
            "report.html",
            title=self.title,
            continued=continued,
            lead=self._lead(),
            problems=self.problems(),
            judged=[card for card in self.cards if card.kind != "small"],
            one_seed=[card for card in self.cards if card.judged.verdict.word == ONE_SEED],
            not_run=[card for card in self.cards if card.judged.verdict.word == NOT_RUN],
            most_cards=MOST_CARDS,
            studies=sections,
            studies_not_run=[
                self._section(study, stats, []) for study, stats in self.studies if not stats.results
            ],
            coefficients=coefficient_figures(self.run, self.known.record),
            facts=self._facts(),
            commands="\n".join(sorted({r.command.split(" --only ")[0] for _, s in self.run for r in s.results})),
            results=results_table([r for _, stats in self.run for r in stats.results]),
        )
        if plots:
            _save_charts(
                [figure for found in figures.values() for figure in found], path.with_name(f"{path.stem}-plots")
            )
        atomic_write(path, page)

    def _section(self, study: Study, stats: Statistics, figures: Sequence[Figure]) -> dict[str, Any]:
        return {
            "name": study.name,
            "title": study.title,
            "question": study.question,
            "finding": f"The paper: {study.finding}" if study.table else study.finding,
            "tables": self.tables(study, stats),
            "figures": figures,
            "alone": len(self.studies) == 1,
        }

    def _lead(self) -> str:
        results = [r for _, stats in self.run for r in stats.results]
        if not results:
            return "No results yet; `altup study run` makes them."
        scales = ", ".join(dict.fromkeys(stats.scale for _, stats in self.run))
        machines = " and ".join(sorted({r.hardware for r in results}))
        words = [card.judged.word for card in self.cards]
        counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        runs = number_of(len({r.run for r in results if r.seed}), "run")
        return f"Scale {scales}: {runs} on {machines}. " + (f"Claims: {counted}." if words else "")

    def _facts(self) -> list[tuple[str, str]]:
        results = [r for _, stats in self.run for r in stats.results]
        facts = {
            "scale": {r.scale for r in results}, "text": {r.data for r in results},
            "hardware": {r.hardware for r in results}, "versions": {r.versions for r in results},
        }  # fmt: skip
        listed = [(name, "; ".join(sorted(values))) for name, values in facts.items() if values]
        return [*listed, ("report written", time.strftime("%Y-%m-%d %H:%M %Z"))]


def _save_charts(figures: Sequence[Figure], folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and plots go to a folder of that name; choose another --out")
    for figure in figures:
        refuse_foreign(folder / f"{figure.name}.svg", [SVG], "a plot")
    for figure in figures:
        folder.mkdir(exist_ok=True)
        atomic_write(folder / f"{figure.name}.svg", standalone_svg(figure.picture))
