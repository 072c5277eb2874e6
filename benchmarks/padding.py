"""How much of a fine-tuning batch is padding: examples as they come, sorted into micro-batches, and packed.

    altup prepare corpus-train.jsonl.zst --validation corpus-validation.jsonl.zst --out data
    python benchmarks/padding.py --tokenizer data/tokenizer --data tasks

It only tokenises. Padding is the share of places without a token in the rows that training would be given in
`--steps` steps. `shapes` counts the shapes of batches among them, each of which a GPU records as a graph of
its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from altup.core.pretrained import load_tokenizer
from altup.data.bad_input import BadInput
from altup.evaluation.answering.seq2seq import Seq2SeqAnswering
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.learning.seq2seq import Seq2SeqLearning
from altup.finetuning.mixture import Mixture, load_data
from altup.finetuning.packing import IGNORED

TASKS = ("sst2", "mrpc", "squad", "glue")


@dataclass(frozen=True)
class Layout:
    name: str
    packing: str | None = None
    micro_batch: int | None = None  # examples; the whole batch


LAYOUTS = (
    Layout("padded"),
    Layout("padded, micro-batches of 32", None, 32),
    Layout("packed, narrow", "narrow"),
    Layout("packed, wide", "wide"),
)


def measure(mixture: Mixture, micro_batch: int, steps: int) -> dict[str, Any]:
    """Shares of padding in the encoder's and the decoder's input, rows a step, and shapes of batches."""
    places, real = np.zeros(2), np.zeros(2)
    rows, shapes = 0, set()
    for step in range(steps):
        for begin in range(0, mixture.batch_size, micro_batch):
            batch = mixture.examples(step, begin, begin + micro_batch)
            seen = batch.get("segments", batch.get("attention_mask"))
            assert seen is not None
            places += (seen.size, batch["labels"].size)
            real += ((seen != 0).sum(), (batch["labels"] != IGNORED).sum())
            rows += len(seen)
            shapes.add((seen.shape, batch["labels"].shape))
    inputs, targets = 100 * (1 - real / places)
    width = max(shape[0][1] for shape in shapes)
    return {"inputs": inputs, "targets": targets, "rows": rows / steps, "width": width, "shapes": len(shapes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer or a model")
    parser.add_argument("--data", required=True, help="folder with SUITE/TASK/SPLIT.jsonl files")
    parser.add_argument("--task", action="append", help=f"repeat it (default: {', '.join(TASKS)})")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--inputs-length", type=int, default=512)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.tokenizer)
    print("| task | layout | encoder padding | decoder padding | rows a step | widest row | shapes |")
    print("|---|---|---|---|---|---|---|")
    for task in given.task or TASKS:
        config = FinetuneConfig(
            model="-", tasks=[task], data=given.data, inputs_length=given.inputs_length, eval_limit=1
        )
        learning = Seq2SeqLearning(Seq2SeqAnswering(tokenizer), config)
        tokens = load_data(config, learning, BadInput("stop"), lambda text: print(text, file=sys.stderr)).mixture
        for layout in LAYOUTS:
            mixture = Mixture(
                tokens.tasks, tokens.shares, given.batch_size, tokenizer.pad_token_id, packing=layout.packing
            )
            found = measure(mixture, layout.micro_batch or given.batch_size, given.steps)
            print(
                f"| {task} | {layout.name} | {found['inputs']:.1f} % | {found['targets']:.1f} % "
                f"| {found['rows']:.0f} | {found['width']} | {found['shapes']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
