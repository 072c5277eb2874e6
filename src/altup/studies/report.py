"""The report of the studies: verdicts first, then each study's table beside the paper's, and what was run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import PNG, SVG, atomic_write, refuse_foreign
from altup.core.text import number_of
from altup.studies.coefficients import coefficient_figures
from altup.studies.drawings import Plot, save_plots, share_plots
from altup.studies.pages import render, title_mark
from altup.studies.plots import study_plots
from altup.studies.results import (
    Record,
    Result,
    add_given_speeds,
    are_of_one_model,
    count_runs,
    drop_other_settings,
    read_record,
    read_results,
    read_scale,
    read_sweep,
    read_sweeps,
    share_results,
)
from altup.studies.statistics import NOT_RUN, ONE_SEED, Statistics, choose_results
from altup.studies.study import Study, find_study, shipped
from altup.studies.sweep_figures import add_given, begun_plots, sweep_plots, sweep_table, sweeps_of
from altup.studies.tables import results_table, speedup_table, study_table
from altup.studies.verdicts import Card, verdict_cards

MOST_CARDS = 20  # of a kind, before the others fold: a page that a phone scrolls through
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
    def as_run(self) -> Statistics:
        """The results of the scale, each under the study that it was run for; none where there are only sweeps."""
        if not self.results and (scales := Counter(sweep["scale"] for sweep in self._sweeps)):
            return Statistics(scales.most_common(1)[0][0], "", [])
        chosen = choose_results(self.results, self.scale)
        return replace(chosen, results=drop_other_settings(chosen.results, self.record))

    @cached_property
    def stats(self) -> Statistics:
        """The same, told by every study that has the model, with the speeds that studies give."""
        results, scale = self.as_run.results, read_scale(self.folders, self.as_run.scale)
        if scale is not None:
            results = share_results(results, self.studies, scale, self.record)
        return replace(self.as_run, results=add_given_speeds(results, self.studies))

    @cached_property
    def studies(self) -> list[Study]:
        return [find_study(name) for name in self.names] or list(shipped().values())

    def record(self, key: str) -> Record | None:
        """What a run kept of itself, from the first folder that has it."""
        if key not in self._records:
            found = (read_record(folder, key) for folder in self.folders)
            self._records[key] = next((record for record in found if record), None)
        return self._records[key]

    def sweeps(self, study: Study) -> dict[tuple[str, str], Record]:
        """(label, size) → the sweep that chose the model's settings. Where it has gone on since the runs, and now
        chooses others, it is the later one, with what the runs have under `ran`."""
        found = sweeps_of(study, self.stats, self.record, lambda key: read_sweep(self.folders, key))
        return {place: add_given(study.row(place[0]), self._gone_on(sweep)) for place, sweep in found.items()}

    def _gone_on(self, sweep: Record) -> Record:
        same = [s for s in self._sweeps if self._is_of_same_model(s, sweep)]
        last = max(same, key=lambda s: (count_runs(s), s["key"] == sweep["key"]), default=sweep)
        if not last["chosen"] or last["chosen"] == sweep["chosen"]:
            return sweep
        return {**last, "ran": sweep["chosen"]}

    def _is_of_same_model(self, one: Record, other: Record) -> bool:
        """Titles leave out much, such as dropout: what the sweeps' runs have in common tells more, where known."""
        if (one["model"], one["scale"]) != (other["model"], other["scale"]):
            return False
        found = [self.record(sweep["runs"][0][2]) if sweep["runs"] else None for sweep in (one, other)]
        first, second = ((record or {}).get("config") for record in found)
        if first is None or second is None:
            return True
        swept = {
            name.partition(".")[0] for sweep in (one, other) for name in (*sweep["grid"], *(sweep["chosen"] or ()))
        }
        fits = _may_have_swept(one, other, second) and _may_have_swept(other, one, first)
        return fits and are_of_one_model(first, second, swept)

    @cached_property
    def begun(self) -> dict[tuple[str, str], Record]:
        """(model, scale) → its sweep, where that goes on or the model has no results yet. A sweep belongs to no
        study alone, so there are none where studies are named that have results."""
        if self.results and self.names:
            return {}
        known = {sweep["key"]: sweep["model"] for study in self.studies for sweep in self.sweeps(study).values()}
        scale = self.as_run.scale
        return {
            (sweep["model"], scale): sweep
            for sweep in self._sweeps
            if sweep["scale"] == scale and sweep["key"] not in known
            and not (sweep["chosen"] and sweep["model"] in known.values())  # an earlier one, of another grid
        }  # fmt: skip

    @cached_property
    def _sweeps(self) -> list[Record]:
        """Of the scale that was asked for, or of all."""
        keys = dict.fromkeys(sweep["key"] for folder in self.folders for sweep in read_sweeps(folder))
        found = [sweep for key in keys if (sweep := read_sweep(self.folders, key))]
        return [sweep for sweep in found if self.scale in (None, sweep["scale"])]

    @cached_property
    def _records(self) -> dict[str, Record | None]:
        return {}

    def runs_without_record(self) -> list[str]:
        """Keys of runs that have results, but whose curves, coefficients and config are gone."""
        runs = dict.fromkeys(r.run for r in self.as_run.results if r.seed)
        return [key for key in runs if self.record(key) is None]

    def write(self, path: Path, plots: bool = True) -> None:
        """The page and, in a folder of its name beside it, every plot as SVG and PNG.

        What is none of ours is not written over."""
        refuse_foreign(path, [title_mark(TITLE), title_mark(OWN_TITLE)], "a report of studies")
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn, shared = share_plots(
            {
                study.name: [*study_plots(study, self.stats, self.record), *sweep_plots(study, self.sweeps(study))]
                for study in self.studies
            }
        )
        coefficient_plots, coefficients = coefficient_figures(self.studies, self.stats, self.record)
        tuning = begun_plots(self.begun)
        all_plots = [*(plot for found in drawn.values() for plot in found), *tuning, *coefficient_plots]
        folder = path.with_name(f"{path.stem}-plots")
        if plots:
            _refuse_foreign_plots(all_plots, folder)
        from_paper = any(study.table for study in self.studies)
        run = {study.name for study in self.studies if self.was_run(study)}
        told = [self._study(study, drawn[study.name], shared[study.name]) for study in self.studies]
        page = render(
            "report.html",
            title=TITLE if from_paper else OWN_TITLE,
            lead=self._lead(),
            claims_title="The paper's claims" if from_paper else "Claims",
            judged=[card for card in self.cards if card.badge],
            one_seed=[card for card in self.cards if card.verdict == ONE_SEED],
            not_run=[card for card in self.cards if card.verdict == NOT_RUN],
            most_cards=MOST_CARDS,
            studies=[study for study in told if study["name"] in run],
            studies_not_run=[study for study in told if study["name"] not in run],
            begun=[sweep_table(self.begun)] if self.begun else [],
            begun_plots=tuning,
            coefficient_plots=coefficient_plots,
            coefficients=coefficients,
            facts=self._facts(),
            commands="\n".join(sorted({r.command.split(" --only ")[0] for r in self.as_run.results})),
            results=results_table(self.as_run),
        )
        atomic_write(path, page)
        if plots:
            save_plots(all_plots, folder)

    def was_run(self, study: Study) -> bool:
        """For itself, or by others that share its models: so far that they judge a claim, or half of its rows."""
        if study.name in {result.study for result in self.as_run.results}:
            return True
        if study.expect:
            return any(verdict.difference for verdict in self.stats.verdicts(study))
        run = [row for row in study.rows if self.stats.sizes(study.name, row.label)]
        return 2 * len(run) > len(study.rows)

    @cached_property
    def cards(self) -> list[Card]:
        """The outcome of every claim of the studies."""
        return verdict_cards(self.studies, self.stats)

    def _study(self, study: Study, plots: list[Plot], shared: list[tuple[Plot, str]]) -> dict[str, Any]:
        tables = [study_table(study, self.stats, self.record)]
        if study.frontier:
            tables.append(speedup_table(study, self.stats))
        if sweeps := self.sweeps(study):
            tables.append(sweep_table(sweeps))
        titles = {other.name: other.title for other in self.studies}
        elsewhere: dict[str, list[str]] = {}
        for plot, name in shared:
            elsewhere.setdefault(name, []).append(plot.title)
        return {
            "name": study.name,
            "title": study.title,
            "question": study.question,
            "finding": study.finding if study.table is None else f"The paper: {study.finding}",
            "tables": tables,
            "plots": plots,
            "elsewhere": [(name, titles[name], ", ".join(found)) for name, found in elsewhere.items()],
        }

    def _lead(self) -> str:
        if not self.stats.results:
            return f"Scale {self.stats.scale}: no results yet, only sweeps; the same `altup study run` goes on."
        runs = {r.run for r in self.stats.results if r.seed}
        machines = sorted({r.hardware for r in self.stats.results})
        words = ["with one seed and no verdict" if c.verdict == ONE_SEED else c.verdict for c in self.cards]
        counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        told = f"Scale {self.stats.scale}: {number_of(len(runs), 'run')} on {' and '.join(machines)}."
        return told + (f" Of {number_of(len(words), 'claim')}: {counted}." if words else "")

    def _facts(self) -> list[tuple[str, str]]:
        run, scales = self.as_run, sorted({r.scale for r in self.results})
        return [
            ("scale", run.scale + (f" (also in the results: {', '.join(scales)})" if len(scales) > 1 else "")),
            *(
                [
                    ("text", f"prepared data {run.data}"),
                    ("hardware", ", ".join(sorted({r.hardware for r in run.results}))),
                    ("versions", "; ".join(sorted({r.versions for r in run.results}))),
                ]
                if run.results
                else []
            ),
            ("report written", time.strftime("%Y-%m-%d %H:%M %Z")),
        ]


def _may_have_swept(one: Record, other: Record, config: Record) -> bool:
    """Whether a run of `other` has, of what `one` alone sweeps, a value that `one` tries, or none of its own."""

    def own(name: str) -> Any:
        field, _, part = name.partition(".")
        return (config.get(field) or {}).get(part) if part else config.get(field)

    alone = one["grid"].keys() - {*other["grid"], *(other["chosen"] or ())}
    return all(own(name) in (None, *one["grid"][name]) for name in alone)


def _refuse_foreign_plots(plots: Sequence[Plot], folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and plots go to a folder of that name; choose another --out")
    for plot in plots:
        refuse_foreign(folder / f"{plot.name}.svg", [SVG], "a plot")
        refuse_foreign(folder / f"{plot.name}.png", [PNG], "a plot")
