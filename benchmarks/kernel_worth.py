"""What each kernel is worth: its time and that of compiled code of the same expression, in one table.

    PYTHONPATH=src python3 benchmarks/kernel_worth.py --out kernel_worth.csv    # one H200, within three minutes

The cases are those of `altup bench kernels`. A kernel whose ratio stays below 1.05 where it is used should go.
"""

from __future__ import annotations

from collections.abc import Sequence

from altup.bench.cases.kernels import problems
from altup.bench.rows import OK, BenchRow
from altup.bench.script import run_script
from altup.bench.show import by_problem, find
from altup.core.tables import print_table, table_console

WORTH = 1.05
PAIR = ("triton", "plain compiled")


def line(mine: Sequence[BenchRow]) -> list[str]:
    """Milliseconds of both in each mode, the ratio of the last, and what went wrong."""
    cells, ratio = [], 0.0
    for mode in ("forward", "backward", "both"):
        pair = [find([row for row in mine if row.provider == name], "ms", [mode]) for name in PAIR]
        times = [row.p50 for row in pair if row is not None and row.p50]
        cells.append(" / ".join(f"{ms:.3f}" for ms in times))
        ratio = times[1] / times[0] if len(times) == 2 else ratio
    wrong = "; ".join(f"{row.provider} {row.status}: {row.note}"[:80] for row in mine if row.status != OK)
    verdict = wrong or ("below 1.05" if 0 < ratio < WORTH else "")
    return [mine[0].method or "", *cells, f"{ratio:.2f}" if ratio else "", verdict]


if __name__ == "__main__":
    rows = run_script(__doc__, problems, seconds=170)
    lines = [line(mine) for mine in by_problem(rows).values()]
    print_table(table_console(), ["triton / compiled, ms", "forward", "backward", "both", "×", ""], lines)
