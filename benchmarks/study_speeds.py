"""How fast the models of a study train, in turns, as the line `speeds:` that a study may have.

    python benchmarks/study_speeds.py STUDY --scale SCALE --data DATA [--set batch_size=128]

Each row's model, of the scale's first size, is fresh and takes whole training steps on one batch, all of them in
one process; nothing else should run on the machine. A ratio is to the first row in turns of the same round; its
median and quartiles are printed. `--set batch_size=128` times other batches than the scale trains with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from altup.core.hardware import device_name
from altup.core.schema import parse_pairs
from altup.studies.configs import resolve
from altup.studies.scale import find_scale, with_settings
from altup.studies.speed import compare_training
from altup.studies.study import find_study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--scale", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="a setting of every run, as batch_size=128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    given = parser.parse_args()
    study = find_study(given.study)
    scale = with_settings(find_scale(given.scale), parse_pairs("--set", given.set))
    size = scale.sizes_of(study)[0]
    found = {row.label: resolve(study, row, size, scale, scale.seeds[0], str(given.data)) for row in study.rows}
    speeds = compare_training({label: c for label, c in found.items() if c}, given.rounds, given.steps)
    for label, speed in speeds.items():
        ratio = f"{speed.relative:.4f} ({speed.low:.4f} to {speed.high:.4f})"
        print(f"{label:24} {speed.seq_per_s:9,.0f} seq/s  {ratio}")
    line = ", ".join(f'"{label}": {speed.relative:.4f}' for label, speed in speeds.items())
    print(f"speeds: {{{line}}}  # {device_name()}")


if __name__ == "__main__":
    main()
