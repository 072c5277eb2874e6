"""How the artefacts in this folder were made, with the code before the modules were regrouped (commit 7f32802).

    PYTHONPATH=/path/to/that/commit/src python tests/legacy/make.py

They are not made again: that the present code reads what older code wrote is the point. It uses the command line
and the names that `altup` exports, so that a later format can be kept beside this one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.golden.record import altup, digest_of_weights, fingerprint, made_up_text  # noqa: E402

STEPS = 14
STOP_AT = 6  # within a window of the log, and between saves
SHAPE = [
    *("--size", "tiny", "--method", "altup", "--set", "d_model=4", "--set", "d_ff=8", "--set", "d_kv=2"),
    *("--set", "num_heads=2", "--set", "num_layers=2", "--inputs-length", "32", "--batch-size", "8"),
]
RUN = [
    *("--steps", STEPS, "--log-every", "4", "--eval-every", "7", "--save-every", "10", "--keep-last", "1"),
    *("--no-keep-best", "--deterministic", "--precision", "fp32", "--track", "none", "--dropout", "0.1"),
]
PRETRAIN = {
    "t5": ["--model", "t5", *SHAPE],
    "bert": ["--model", "bert", *SHAPE, "--optimizer", "adamw"],
    "decoder": ["--model", "decoder", *SHAPE, "--set", "num_kv_heads=1", "--optimizer", "adamw-rms"],
}
FINETUNE = ["finetune", "t5-finished", "--task", "task", "--batch-size", "4", "--lr", "0.01"]


def stopped(*arguments: object) -> None:
    """`altup arguments…`, sent SIGTERM in the forward pass of step STOP_AT."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    passes = itertools.count(1)

    def hook(module: Any, inputs: Any) -> None:
        whole = type(module).__name__.endswith(("ForConditionalGeneration", "ForMaskedLM", "ForCausalLM"))
        if whole and module.training and next(passes) == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    handle = register_module_forward_pre_hook(hook)
    try:
        altup(*arguments)
    except RuntimeError as error:  # exit code 75
        print(str(error).splitlines()[-1])
    else:
        raise RuntimeError("was not stopped")
    finally:
        handle.remove()


def tidy(run: Path) -> None:
    """What no later run reads."""
    (run / ".lock").unlink(missing_ok=True)
    (run / "curves.png").unlink(missing_ok=True)


def make_runs(expected: dict[str, Any]) -> None:
    Path("text.txt").write_text(made_up_text(1000), encoding="utf-8")
    altup(
        "prepare", "text.txt", "--out", "data", "--vocab-size", 360, "--validation-fraction", 0.2, "--workers", 1
    )
    for family, arguments in PRETRAIN.items():
        command = ["pretrain", "--data", "data", *arguments, *RUN, "--eval-sequences", "9"]
        altup(*command, "--out", f"{family}-finished")
        stopped(*command, "--out", f"{family}-stopped")
    lines = [{"input": line, "target": line.split()[0]} for line in made_up_text(60).split("\n\n")]
    Path("task").mkdir()
    for split, part in (("train", lines[:48]), ("validation", lines[48:])):
        Path("task", f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    altup(*FINETUNE, *RUN, "--out", "finetuned-finished")
    stopped(*FINETUNE, *RUN, "--out", "finetuned-stopped")
    for family in (*PRETRAIN, "finetuned"):
        tidy(Path(f"{family}-finished"))
        tidy(Path(f"{family}-stopped"))
        expected["weights"][family] = digest_of_weights(Path(f"{family}-finished/final"))
        if family != "t5":  # to keep this folder small
            shutil.rmtree(f"{family}-finished/checkpoints")


def make_models() -> None:
    """A Hugging Face T5 upcycled, and a Llama and a GPT-2 widened."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    from altup import widen

    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_layers": 2}
    plain = T5ForConditionalGeneration(
        T5Config(vocab_size=64, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **shape)
    )
    plain.save_pretrained("plain-t5")
    altup("upcycle", "plain-t5", "--out", "upcycled", "--method", "altup")
    shutil.rmtree("plain-t5")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64,
        )
    )  # fmt: skip
    widen(llama, "recycled", 2).save_pretrained("widened-llama")
    tokens: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=8, n_layer=2, n_head=2, **tokens))
    widen(gpt2, "altup", 2).save_pretrained("widened-gpt2")


def logits(model: Any) -> list[float]:
    """The first few numbers that a model computes for fixed tokens."""
    import torch

    ids = (torch.arange(24).reshape(2, 12) * 7) % 61 + 2
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        found: list[float] = model.eval()(**inputs).logits[:, -1, :8].flatten().tolist()
    return found


def main() -> None:
    import torch

    from altup import AltUpT5ForConditionalGeneration, load_widened

    torch.set_num_threads(1)
    os.chdir(HERE)
    expected: dict[str, Any] = {"fingerprint": fingerprint(), "weights": {}}
    make_runs(expected)
    Path("text.txt").unlink()
    make_models()
    expected["logits"] = {
        "upcycled": logits(AltUpT5ForConditionalGeneration.from_pretrained("upcycled")),
        "widened-llama": logits(load_widened("widened-llama")),
        "widened-gpt2": logits(load_widened("widened-gpt2")),
    }
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
