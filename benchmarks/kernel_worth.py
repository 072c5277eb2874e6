"""What each kernel is worth: its time and that of compiled code of the same expression, in one table.

    PYTHONPATH=src python3 benchmarks/kernel_worth.py --out kernel_worth.csv    # one H200, within three minutes

The cases are those of `altup bench kernels`. A kernel whose ratio stays below 1.05 where it is used should go.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from altup.bench.cases import BenchConfig
from altup.bench.rows import OK, Machine, Sheet
from altup.bench.runner import measure
from altup.bench.show import by_problem, find
from altup.core.tables import print_table, table_console

WORTH = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=170, help="stop then, with what was measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="toy sizes, which time nothing on a CPU")
    parser.add_argument("--out", type=Path, help="a CSV file of the rows")
    given = parser.parse_args()
    config = BenchConfig(cases=["kernels"], quick=given.quick, time_limit=given.seconds, repeat=given.rounds)

    def sheets(machine: Machine) -> list[Sheet]:
        return [Sheet(given.out, machine)] if given.out else []

    rows = measure(config, sheets, lambda text: None)
    lines = []
    for mine in by_problem(rows).values():
        cells, ratios = [], []
        for mode in ("forward", "backward", "both"):
            kernel, compiled = (
                find([row for row in mine if row.provider == provider], "ms", [mode])
                for provider in ("triton", "plain compiled")
            )
            if kernel and compiled and kernel.p50 and compiled.p50:
                cells.append(f"{kernel.p50:.3f} / {compiled.p50:.3f}")
                ratios.append(compiled.p50 / kernel.p50)
            else:
                cells.append("")
        wrong = "; ".join(f"{row.provider} {row.status}: {row.note}" for row in mine if row.status != OK)
        verdict = wrong[:60] if wrong else "" if not ratios or ratios[-1] >= WORTH else "below 1.05"
        lines.append([mine[0].method or "", *cells, f"{ratios[-1]:.2f}" if ratios else "", verdict])
    print_table(table_console(), ["triton / compiled, ms", "forward", "backward", "both", "×", ""], lines)


if __name__ == "__main__":
    main()
