"""Fine-tune a Gemma 3n with TRL on the paragraphs of a text file: LoRA, or QLoRA with `--four-bit`.

    python examples/gemma3n_trl.py                                  # a tiny random one on Python's own prose
    python examples/gemma3n_trl.py --model google/gemma-3n-E2B-it --text my.txt --steps 500 --four-bit --packing

The lines marked `# altup` are all that is new. Paragraphs have lengths of their own: padding is not computed, and
with `--packing` they lie end to end in rows. Needs `pip install trl peft`, and bitsandbytes for four bits.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Gemma3nTextConfig,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

import altup  # altup


def load(name: str | None, four_bit: bool) -> tuple[Any, Any]:
    """A model and its tokenizer; the tiny one's tokens are bytes."""
    if name is None:
        torch.manual_seed(0)
        config = Gemma3nTextConfig(
            vocab_size=260, vocab_size_per_layer_input=260, hidden_size=32, intermediate_size=64, head_dim=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_kv_shared_layers=0,
            hidden_size_per_layer_input=8, laurel_rank=8,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        # A fresh model's padding is a row of zeros, where gradients of the original code are not finite.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
        return model, byte_tokenizer()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": "auto"}
    if four_bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=altup.skip_modules(name),  # altup
        )
    return AutoModelForCausalLM.from_pretrained(name, **options), AutoTokenizer.from_pretrained(name)


def byte_tokenizer() -> Any:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
    )
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Gemma 3n on the hub or in a folder")
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024, help="tokens of the longest row")
    parser.add_argument("--four-bit", action="store_true", help="QLoRA: the model's weights in four bits")
    parser.add_argument("--packing", action="store_true", help="paragraphs end to end in rows")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp())

    prose = options.text.read_text() if options.text else "\n".join(pydoc_data.topics.topics.values())[:60_000]
    paragraphs = [part.strip() for part in prose.split("\n\n") if part.strip()]
    model, tokenizer = load(options.model, options.four_bit)
    arguments = SFTConfig(
        output_dir=str(output / "run"),
        max_steps=options.steps,
        max_length=options.length,
        packing=options.packing,
        per_device_train_batch_size=4,
        learning_rate=1e-2 if options.model is None else 2e-4,
        logging_steps=max(1, options.steps // 5),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": paragraphs}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    altup.accelerate(trainer.model)  # altup
    print(altup.explain(trainer.model))  # altup
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    trainer.save_model(str(output / "adapter"))
    print(f"the adapter is in {output / 'adapter'}")


if __name__ == "__main__":
    main()
