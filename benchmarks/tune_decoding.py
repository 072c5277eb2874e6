"""A recorded decoding step of T5 base with other tiles: milliseconds, and those of plain code.

    python benchmarks/tune_decoding.py --rows 1 4 64
    TRITON_INTERPRET=1 python benchmarks/tune_decoding.py    # toy sizes, checked and not timed

512 random vectors a row to attend to, with a mask and without cuDNN's attention, as `generate` has it; 100 tokens,
the median of three runs. More rows than one are decoded as many, but for `MANY_ROWS=1025`, the kernels of few.
Before a step is timed its tokens are compared with those of plain code; where they are worse, it says so.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from tuning import DEVICE, INTERPRETED

import altup
from altup.kernels import decoding
from altup.kernels.decoding import attention, many_rows, maps
from altup.models.recorded_decoding import repeatable_attention
from altup.models.t5 import kept_decoding
from altup.models.t5.kept_decoding import KeptDecoding, Prompts

STEPS, INPUTS = (3, 70) if INTERPRETED else (100, 512)
Changes = dict[Any, Any]  # (module, name) → value
NOT_EARLY: Changes = {(decoding, "_begins_early"): lambda x: False}
MANY_ROWS, TILES = (decoding, "MANY_ROWS"), (many_rows, "TILES")
TILE, BLOCK, PROGRAMS = (maps, "TILE"), (attention, "BLOCK"), (attention, "PROGRAMS")
FETCHED, KEYS, STAGES = ((attention, name) for name in ("FETCHED", "MEMORY_BLOCK", "STAGES"))
COLUMNS, DEPTH = (maps, "HEAD_COLUMNS"), (maps, "HEAD_DEPTH")
ONE_ROW: list[Changes] = [
    {}, NOT_EARLY, {FETCHED: 0}, {TILE: 4096}, {TILE: 8192}, {PROGRAMS: 48}, {BLOCK: 128},
    {BLOCK: 32, PROGRAMS: 192},
]  # fmt: skip
MORE_ROWS: list[Changes] = [
    {}, {MANY_ROWS: 1025}, NOT_EARLY, {FETCHED: 0}, {TILES: {}},
    {TILES: dict.fromkeys(many_rows.TILES, many_rows.Tile(64, 256, 256, 3))},
    {KEYS: 64, STAGES: 1}, {STAGES: 4}, {COLUMNS: 64}, {DEPTH: 128}, {BLOCK: 32},
]  # fmt: skip


def build() -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": 100, "num_layers": 1, "num_decoder_layers": 1} if INTERPRETED else {}
    config = altup.AltUpT5Config.from_preset("tiny" if INTERPRETED else "base", "dense", **small)
    with torch.device(DEVICE):
        model = altup.AltUpT5ForConditionalGeneration(config)
    return model.to(torch.float32 if INTERPRETED else torch.bfloat16).eval()


def prepare(model: Any, prompts: Prompts, changes: Changes) -> KeptDecoding:
    """A step with these constants."""
    changes = {MANY_ROWS: 2, **changes}
    before = {place: getattr(*place) for place in changes}
    for (module, name), value in changes.items():
        setattr(module, name, value)
    try:
        return KeptDecoding(model, prompts)
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def milliseconds(made: KeptDecoding) -> str:
    times = []
    for _ in range(1 if INTERPRETED else 3):
        made.begin()
        if INTERPRETED:
            made.step()
            return "not timed"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            made.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / STEPS)
    return f"{statistics.median(times):.4f} ms"


def told(change: tuple[Any, Any]) -> str:
    (_, name), value = change
    value = sorted(map(tuple, set(value.values()))) if isinstance(value, dict) else value
    return "not early" if callable(value) else f"{name}={value}"


@torch.inference_mode()
@repeatable_attention()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2] if INTERPRETED else [1, 64])
    options = parser.parse_args()
    model = build()
    for rows in options.rows:
        memory = torch.randn(rows, INPUTS, model.config.d_model, device=DEVICE, dtype=model.dtype)
        start = torch.zeros(rows, 1, dtype=torch.long, device=DEVICE)
        mask = torch.ones(rows, INPUTS, dtype=torch.long, device=DEVICE)
        prompts = Prompts(start, STEPS + 8, None, 0, memory, mask)
        for changes in ONE_ROW if rows == 1 else MORE_ROWS:
            name = ", ".join(map(told, changes.items())) or "as it is"
            made = prepare(model, prompts, changes)
            print(f"{rows} rows, {name}: {milliseconds(made) if made.is_fused else 'wrong'}", flush=True)
        plain = prepare(model, prompts, {(kept_decoding, "can_fuse"): lambda model: False})
        print(f"{rows} rows, plain code: {milliseconds(plain)}", flush=True)


if __name__ == "__main__":
    main()
