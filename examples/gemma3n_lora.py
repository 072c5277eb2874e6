"""Fine-tune a Gemma 3n with LoRA on a text file; the three lines marked `# altup` are all that is new.

    python examples/gemma3n_lora.py                                    # a tiny random one on Python's own prose
    python examples/gemma3n_lora.py --model google/gemma-3n-E2B-it --text my.txt --steps 500

Needs PEFT (`pip install peft`). Without a GPU the original code runs, and a warning says so.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3nTextConfig, Trainer, TrainingArguments

import altup  # altup


def rows(text: Path | None, model_name: str | None, length: int) -> list[dict[str, Tensor]]:
    """Rows of `length` tokens; for the tiny model a token is a byte."""
    prose = text.read_text() if text else "\n".join(pydoc_data.topics.topics.values())[:60_000]
    ids = AutoTokenizer.from_pretrained(model_name)(prose).input_ids if model_name else list(prose.encode())
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def load(model_name: str | None) -> Any:
    if model_name:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return AutoModelForCausalLM.from_pretrained(model_name, dtype="bfloat16").to(device)
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=256, vocab_size_per_layer_input=256, hidden_size=32, intermediate_size=64, head_dim=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_kv_shared_layers=0,
        hidden_size_per_layer_input=8, laurel_rank=8,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Gemma 3n on the hub or in a folder")
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, help="tokens of a row")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp())

    data = rows(options.text, options.model, options.length or (1024 if options.model else 32))
    model = load(options.model)
    altup.accelerate(model)  # altup
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    arguments = TrainingArguments(
        output_dir=str(output / "run"),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2 if options.model is None else 2e-4,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"loss before {before:.3f}, after {trainer.evaluate()['eval_loss']:.3f}")
    altup.decelerate(model)  # altup
    model.save_pretrained(output / "adapter")
    print(f"the adapter is in {output / 'adapter'}")


if __name__ == "__main__":
    main()
