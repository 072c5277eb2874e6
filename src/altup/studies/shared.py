"""Models that studies have in common: what was run for one study stands in the tables of the others as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from altup.studies.evidence import Evidence
from altup.studies.inputs import key_of
from altup.studies.results import Result
from altup.studies.study import SCALES, Study

Records = Callable[[str], dict[str, Any] | None]
Place = tuple[str, str, str]  # study, label, size
Measured = dict[tuple[str, str], Result]  # by seed and measure


def with_shared(evidence: Evidence, studies: Sequence[Study], record: Records) -> Evidence:
    """Evidence with every seed and measure of a model under all the studies that have that model.

    Models are the same where everything that decides what they compute is, except the seed. Only shipped scales
    say what a study would run: results with other settings stay where they are.
    """
    if evidence.scale not in SCALES:
        return evidence
    by_place: dict[Place, Measured] = {}
    for result in sorted(evidence.results, key=lambda r: (r.date, r.run)):
        where = result.study, result.label, result.size
        by_place.setdefault(where, {})[result.seed, result.metric] = result
    models: dict[str, Measured] = {}
    for found in by_place.values():
        for (seed, metric), result in found.items():
            kept = record(result.run) if metric == "accuracy" else None
            if kept:
                of_seed = {which: r for which, r in found.items() if which[0] in (seed, "")}
                models.setdefault(_model(kept["config"], kept["start"]), {}).update(of_seed)
    added = []
    for (study, label, size), model in _wanted(studies, evidence):
        own = by_place.get((study, label, size), {})
        added += [
            replace(result, study=study, label=label, size=size)
            for which, result in models.get(model, {}).items()
            if which not in own
        ]
    return replace(evidence, results=[*evidence.results, *added])


def _wanted(studies: Sequence[Study], evidence: Evidence) -> Iterable[tuple[Place, str]]:
    """Every model that the studies run at the scale."""
    from altup.studies.plan import deciding_fields, resolve
    from altup.studies.scale import find_scale

    scale = find_scale(evidence.scale)
    for study in studies:
        for size in scale.sizes_of(study):
            for row in study.rows:
                config = resolve(study, row, size, scale, 0, evidence.data)
                if config is None or study.equal_time not in (None, row.label):
                    continue  # steps that fit into a time are not known here
                yield (study.name, row.label, size), _model(deciding_fields(config), row.start)


def _model(config: dict[str, Any], start: dict[str, str]) -> str:
    return key_of({name: value for name, value in config.items() if name != "seed"}, start)
