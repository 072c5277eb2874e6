"""The numbers printed in the AltUp paper, one CSV a table, so that ours can stand beside them.

`model` and `method` are the names of our presets. Three places need a word:

- `sequence`: the paper heads the fine-tuning columns GLUE and SuperGLUE, but its baseline rows are the
  SuperGLUE and SQuAD numbers of its other tables; the columns here are named after what they hold.
- Large with AltUp on SQuAD is 87.81/94.29 in two tables and 87.58/94.27 in `block_selection`.
- `size_matched`: the paper says that the deeper dense model is "roughly 10 % slower"; that is the 0.9.
"""

from __future__ import annotations

import csv
from importlib.resources import files

from altup.core.errors import check_choice

TABLES = (
    *("parameters_and_speed", "varying_k", "recycled", "block_selection", "sequence", "moe"),
    *("size_matched", "speedup_at_equal_accuracy", "bert"),
)


def table(name: str) -> list[dict[str, str | int | float]]:
    """The rows of one table, numbers as numbers."""
    check_choice("table", name, TABLES)
    text = files(__package__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return [{column: _value(cell) for column, cell in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(cell: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
