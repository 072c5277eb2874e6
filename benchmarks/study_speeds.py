"""How fast the models of a study train, in turns, as the line `speeds:` that a study may have.

    python benchmarks/study_speeds.py STUDY --scale SCALE --data DATA [--set batch_size=128] [--results DIR]

Each row's model, of the scale's first size, is fresh and takes whole training steps on one batch, all of them in
one process. A ratio is to the study's baseline in turns of the same round; its median and quartiles are printed.
`--set batch_size=128` times other batches than the scale trains with. `--results` adds what was measured to a
folder of results: there `altup study run` finds the steps of equal time, and measures nothing again.

Nothing else should run on the machine while models are timed. With `--go FILE` they are built beside other work:
the script says READY, and times as soon as FILE exists, which is when the others must have been stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from turns import Gate

from altup.core.hardware import device_name
from altup.core.schema import parse_pairs
from altup.studies.configs import resolve
from altup.studies.jobs import StudyData, speed_key
from altup.studies.results import Result, origin, write_results
from altup.studies.scale import Scale, find_scale, with_settings
from altup.studies.speed import Speed, compare_training
from altup.studies.study import METRICS, Study, find_study

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--scale", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, as batch_size=128")
    parser.add_argument("--only", action="append", default=[], help="a row beside the baseline; repeat it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--results", type=Path, help="a folder of studies' results, to which the speeds are added")
    parser.add_argument("--go", type=Path, metavar="FILE", help="build, say READY, and time once FILE exists")
    given = parser.parse_args()
    study = find_study(given.study)
    scale = with_settings(find_scale(given.scale), parse_pairs("--set", given.set))
    size = scale.sizes_of(study)[0]
    wanted = given.only or [row.label for row in study.rows]
    labels = list(dict.fromkeys([study.baseline, *wanted]))  # what the others are compared with comes first
    found = {
        label: resolve(study, study.row(label), size, scale, scale.seeds[0], str(given.data)) for label in labels
    }
    configs = {label: config for label, config in found.items() if config}
    speeds = compare_training(configs, given.rounds, given.steps, Gate(given.go).wait)
    for label, speed in speeds.items():
        ratio = f"{speed.relative:.4f} ({speed.low:.4f} to {speed.high:.4f})"
        print(f"{label:24} {speed.seq_per_s:9,.0f} seq/s  {ratio}")
    line = ", ".join(f'"{label}": {speed.relative:.4f}' for label, speed in speeds.items())
    print(f"speeds: {{{line}}}  # {device_name()}")
    if given.results:
        data = StudyData.prepared(str(given.data), None)
        write_results(given.results, rows_of(study, scale, size, configs, speeds, data))


def rows_of(
    study: Study,
    scale: Scale,
    size: str,
    configs: Mapping[str, PretrainConfig],
    speeds: Mapping[str, Speed],
    data: StudyData,
) -> Iterator[Result]:
    """The speeds as rows of the study's results, at every length of the size."""
    machine = origin()
    command = shlex.join(["python", "benchmarks/study_speeds.py", *sys.argv[1:]])
    for label, speed in speeds.items():
        run = speed_key(configs[label], data.vocabulary.padded_size, device_name())
        for variant in scale.variants_of(study):
            common = Result(
                study=study.name, label=label, size=variant.name, seed="", scale=scale.name, data=data.identity,
                metric="", value=0.0, unit="", step="", run=run, command=command, **machine,
            )  # fmt: skip
            measured = {"train_seq_per_s": speed.seq_per_s, "relative_speed": speed.relative}
            for metric, value in measured.items() if variant.size == size else ():
                yield replace(common, metric=metric, value=value, unit=METRICS[metric].unit)


if __name__ == "__main__":
    main()
