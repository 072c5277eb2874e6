"""Widen a Hugging Face model and train it on with `transformers.Trainer`.

    python examples/widen_and_finetune.py                              # a tiny random Llama on Python's own prose
    python examples/widen_and_finetune.py --model gpt2 --method altup  # a real one, from the hub or a folder

The widened model starts where the original stands: the loss before training is the same.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import altup


def rows(model_name: str | None, length: int = 64) -> list[dict[str, Tensor]]:
    """Python's help pages in rows of `length` tokens; for the tiny model a token is a byte."""
    text = "\n".join(pydoc_data.topics.topics.values())[:60_000]
    ids = AutoTokenizer.from_pretrained(model_name)(text).input_ids if model_name else list(text.encode())
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def load(model_name: str | None) -> PreTrainedModel:
    if model_name:
        return AutoModelForCausalLM.from_pretrained(model_name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config)


class WideTrainer(altup.WideTrainerMixin, Trainer):
    """A rate of their own for the coefficients, and no weight decay."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model on the hub or in a folder")
    parser.add_argument("--method", default="recycled", choices=("recycled", "altup", "sameup"))
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp())

    data = rows(options.model)
    training, held_out = data[:-16], data[-16:]
    model = load(options.model)
    arguments = TrainingArguments(
        output_dir=str(output / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3 if options.model is None else 5e-5,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    original = Trainer(model=model, args=arguments, eval_dataset=held_out).evaluate()["eval_loss"]
    wide = altup.widen(model, options.method, options.k)
    trainer = WideTrainer(model=wide, args=arguments, train_dataset=training, eval_dataset=held_out)
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    end = trainer.evaluate()["eval_loss"]
    print(f"held-out loss: original {original:.4f}, widened {start:.4f}, trained {end:.4f}")

    wide.save_pretrained(output / "widened")
    loaded = altup.load_widened(output / "widened").to(wide.device)
    prompt = held_out[0]["input_ids"][None, :8].to(wide.device)
    text = loaded.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, wide.generate(prompt, max_new_tokens=8, do_sample=False))
    print(f"saved in {output / 'widened'}; load it with altup.load_widened")


if __name__ == "__main__":
    main()
