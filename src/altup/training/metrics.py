"""What a run measures: sums over its steps, loss and accuracy on held-out examples, and its metrics.jsonl."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from altup.core.errors import UserError
from altup.core.files import atomic_write, check_regular, flush, parse_json
from altup.core.text import number_of, shorten
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import IGNORED, label_name, share, to_tensors

if TYPE_CHECKING:
    from altup.training.checkpoints import TrainingState

CHAIN = "chain"  # field of a line in the file, which no record has
TEXTS = ("split", "error")  # fields of a record; all others are numbers
# The split of a record: an evaluation, and one that failed, with its reason as `error`.
VALIDATION, FAILED = "validation", "failed evaluation"

# The sums over tokens in a model's output.
SUMS = ("loss_sum", "nll_sum", "num_correct", "num_tokens")
_STEPS = ("steps", "grad_norm", "skipped", "in_a_row", "longest")


def output_sums(out: Any) -> torch.Tensor:
    """loss_sum, nll_sum, num_correct and num_tokens of a model's output, in float64."""
    return torch.stack([getattr(out, name).detach().double() for name in SUMS])


class Meter:
    """Sums over the steps since the last log, kept on the device so that no step waits for the host.

    `sums` are this process's share, in float64, where sums of float32 numbers do not depend on their order;
    `counts` are the same on every process: steps that counted, their gradient norms, skipped steps, how many
    of these came last in a row, and the longest such row.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.counts = torch.zeros(len(_STEPS), dtype=torch.float64, device=device)

    def add(self, sums: torch.Tensor, grad_norm: torch.Tensor, skip: torch.Tensor) -> None:
        """One step: `sums` as in a model's output; a skipped step counts as skipped and nothing else."""
        self.sums += torch.where(skip, 0.0, sums)
        steps, norm, skipped, in_a_row, longest = self.counts
        skip_number = skip.double()
        in_a_row = (in_a_row + 1) * skip_number
        self.counts = torch.stack(
            [
                steps + 1 - skip_number,
                norm + torch.where(skip, 0.0, grad_norm.double()),
                skipped + skip_number,
                in_a_row,
                torch.maximum(longest, in_a_row),
            ]
        )

    def read(self, process_group: ProcessGroup) -> dict[str, float]:
        """Everything by name, summed over the ranks; waits for the device."""
        sums = process_group.all_reduce(self.sums.clone())
        values = torch.cat([sums, self.counts]).tolist()
        return dict(zip((*SUMS, *_STEPS), values, strict=True))

    def start_window(self) -> None:
        """After a log: begin new sums; the total of skipped steps and the present row go on."""
        self.sums.zero_()
        self.counts[:2] = 0

    def restore(self, values: dict[str, float], process_group: ProcessGroup) -> None:
        """Continue from what `read` gave; only the first process holds it."""
        if lacking := [name for name in (*SUMS, *_STEPS) if name not in values]:
            raise UserError(f"the checkpoint's meter has no {lacking[0]}; resume from another checkpoint")
        if process_group.is_first:
            self.sums.copy_(torch.tensor([values[name] for name in SUMS], dtype=torch.float64))
        self.counts.copy_(torch.tensor([values[name] for name in _STEPS], dtype=torch.float64))


def means(values: dict[str, float]) -> dict[str, float]:
    """Per-token loss (cross-entropy, nats), accuracy and total loss (with z-loss and the like) of a window."""
    tokens = values["num_tokens"]
    if not tokens:
        return {}
    return {
        "loss": values["nll_sum"] / tokens,
        "accuracy": values["num_correct"] / tokens,
        "total_loss": values["loss_sum"] / tokens,
    }


Evaluate = Callable[[nn.Module, int], dict[str, float]]


class EvaluationError(RuntimeError):
    """An evaluation that failed on every rank, so that all of them can go on together."""


@contextlib.contextmanager
def all_or_none(process_group: ProcessGroup) -> Iterator[None]:
    """Around work of an evaluation that waits for no other rank: if one fails, EvaluationError on all of them."""
    try:
        with process_group.together():
            yield
    except Exception as error:  # a metric, or a disk
        raise EvaluationError(describe_error(error)) from error


def describe_error(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero`; a sentence for people stands alone."""
    told = shorten(str(error), 300) or "no reason given"
    return told if isinstance(error, UserError | EvaluationError) else f"{type(error).__name__}: {told}"


class FixedExamples(Protocol):
    """A set of examples, such as `altup.data.batches.HeldOut`."""

    def __len__(self) -> int: ...

    def examples(self, start: int, stop: int) -> dict[str, np.ndarray]: ...


def held_out_loss(
    data: FixedExamples, batch_size: int, process_group: ProcessGroup, autocast: Callable[[], Any]
) -> Evaluate:
    """An `evaluate` callback for the loop: teacher-forced loss and accuracy over all of `data`.

    Every process takes its share of each batch, as in training, so that it works with sharded models.
    """
    first, last = share(batch_size, process_group)

    @torch.no_grad()
    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=process_group.device)
        for begin in range(0, len(data), batch_size):
            batch = to_tensors(full_batch(data, begin + first, begin + last), process_group)
            inputs = {name: t.to(process_group.device, non_blocking=True) for name, t in batch.items()}
            with autocast():
                sums += output_sums(model(**inputs, return_logits=False))
        model.train(was_training)
        return means(dict(zip(SUMS, process_group.all_reduce(sums).tolist(), strict=True)))

    return evaluate


def full_batch(data: FixedExamples, start: int, stop: int) -> dict[str, np.ndarray]:
    """Examples start..stop-1; past the end rows whose labels are all ignored, so that shapes stay the same."""
    arrays = data.examples(start, stop)
    labels = label_name(arrays)
    missing = stop - start - len(arrays[labels])
    if not missing:
        return arrays
    filler = {name: np.repeat(a, missing, axis=0) for name, a in data.examples(0, 1).items()}
    filler[labels] = np.full_like(filler[labels], IGNORED)
    return {name: np.concatenate([a, filler[name]]) for name, a in arrays.items()}


class JsonLines:
    """metrics.jsonl, the record of a run: one JSON object a line, `step` and `split` in each.

    `chain` is a hash of the line and of the one before it: a line that was changed, doubled or moved is noticed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        lines = _chained_lines(path)
        self._number, self._chain = len(lines), lines[-1][1] if lines else ""

    def record(self, values: dict[str, Any]) -> None:
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}
        self._chain = _link(self._chain, finite)
        self._file.write(json.dumps({**finite, CHAIN: self._chain}) + "\n")
        self._file.flush()
        self._number += 1

    def sync(self) -> int:
        """Flush all records to the disk; their number."""
        flush(self._path)
        return self._number

    def close(self) -> None:
        self._file.close()


def _link(before: str, record: dict[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


def _chained_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Each record that is linked to the line before it, with its link. A half line at the end (a killed run) is
    skipped; so is what no run has written, and what was changed since. In a file without any link, which another
    program wrote, every record counts."""
    if not path.exists():
        return []
    found: list[tuple[dict[str, Any], str]] = []
    for line in check_regular(path).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict):
                found.append((record, str(record.pop(CHAIN, ""))))
    before = ["", *(link for _, link in found)]
    linked = any(before)
    return [
        (record, link)
        for (record, link), last in zip(found, before, strict=False)
        if isinstance(record.get("step"), int) and (not linked or link == _link(last, record))
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file that are whole and as they were written. Each has a `step` and a `split`; all
    but `TEXTS` are numbers."""
    records = []
    for record, _ in _chained_lines(path):
        kept = {name: value for name, value in record.items() if _is_text_or_number(name, value)}
        records.append({**kept, "split": kept.get("split", "")})
    return records


def _is_text_or_number(name: str, value: Any) -> bool:
    """As a run writes them; null stands for a number that is not finite."""
    if name in TEXTS:
        return isinstance(value, str)
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def lost_records(path: Path, state: TrainingState) -> str | None:
    """What to say of a file that holds fewer of the run's records than when `state` was saved."""
    left = sum(bool(link) and record["step"] <= state.step for record, link in _chained_lines(path))
    if left >= state.records:
        return None
    return (
        f"{path}: of {number_of(state.records, 'record')} up to step {state.step:,} only {left:,} are left as "
        "they were written: the file was cut or edited. Curves and the model card lack the others; training "
        "does not need them"
    )


def cut_after(path: Path, step: int, measures_again: bool = False) -> None:
    """Drop the records after `step`, so that a resumed run writes them once; of `step` itself, those of an
    evaluation that it repeats."""
    repeated = (VALIDATION, FAILED) if measures_again else ()
    text, link = "", ""
    for record, _ in _chained_lines(path):
        if record["step"] < step or (record["step"] == step and record.get("split") not in repeated):
            link = _link(link, record)
            text += json.dumps({**record, CHAIN: link}) + "\n"
    atomic_write(path, text)
