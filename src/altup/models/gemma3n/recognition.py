"""Which classes of the installed transformers the fused classes may replace.

A fused class repeats what its own class computes, and reads its members by name. Another version of transformers
may compute something else, or name its members otherwise. So each fused class is tried once a process, with its
formulas in plain PyTorch, in a tiny model beside the original: losses, every gradient, and logits with padding,
packed rows and a cache. A changed formula or a missing name shows there; a renamed variable does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Gemma3nConfig, Gemma3nTextConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.gemma3n import modeling_gemma3n

TESTED = "5.15 to 5.23"  # versions of transformers in which every part was recognized
ROWS, LENGTH, WIDTH = 24, 7, 16  # of the tiny model: vocabulary, tokens, d
TOLERANCE = 1e-4  # relative, of float32

# Where a fused class fails, what it brings is lost.
BRINGS = {
    "Gemma3nRMSNorm": "norms as one kernel",
    "Gemma3nTextMLP": "the fused gate of the feed-forward network",
    "Gemma3nTextAttention": "attention within windows, and fused rotary positions",
    "Gemma3nTextAltUp": "AltUp's kernels (predict, correct)",
    "Gemma3nTextDecoderLayer": "additions fused with norms, and the correction fused with the per-layer input",
    "Gemma3nTextModel": "the fused projections before the first layer and after the last",
    "Gemma3nForCausalLM": "the loss without logits, and CUDA graphs in generate",
    "Gemma3nForConditionalGeneration": "the loss without logits, and CUDA graphs in generate",
}


def differences(bases: Iterable[Any], fuse: Callable[[nn.Module, set[Any]], None]) -> dict[Any, str]:
    """By class, how its fused class differs from it; classes that agree are missing.

    `fuse(model, classes)` gives the parts of `model` that are of these classes their fused ones. Each class is
    tried together with those before it that agree, because fused classes work with each other.
    """
    with _settings():
        trials = [_Trial(_tiny_model), _Trial(_head_without_towers)]
        if not any(trial.difference(fuse, set(bases)) for trial in trials):
            return {}
        agree: set[Any] = set()
        found: dict[Any, str] = {}
        for base in bases:
            reason = next((r for trial in trials if (r := trial.difference(fuse, {*agree, base}))), None)
            if reason is None:
                agree.add(base)
            else:
                found[base] = reason
        return found


@contextmanager
def _settings() -> Iterator[None]:
    """Float32 on a CPU, whatever the caller has set, and without drawing from the caller's random numbers."""
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)


class _Trial:
    """A model and what the original code makes of it."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.model = build()
        with torch.no_grad():
            for parameter in self.model.parameters():  # a fresh model has zeros and ones in many slots
                parameter.add_(torch.randn_like(parameter) * 0.3)
            for module in self.model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight[0] *= 1e-3  # a token whose magnitude is below the floor of the projections
        self.wanted = _observe(copy.deepcopy(self.model))

    def difference(self, fuse: Callable[[nn.Module, set[Any]], None], classes: set[Any]) -> str | None:
        model = copy.deepcopy(self.model)
        try:
            fuse(model, classes)
            got = _observe(model)
        except Exception as error:  # whatever another version raises, the class is not used
            return f"{type(error).__name__}: {error}"
        largest = max(value.norm().item() for name, value in self.wanted.items() if name.startswith("gradient"))
        for name, want in self.wanted.items():
            scale = max(want.norm().item(), 1e-2 * largest if name.startswith("gradient") else 0.0)
            if name not in got or got[name].shape != want.shape:
                return f"no {name}, or of another shape"
            if (off := (got[name] - want).norm().item()) > TOLERANCE * scale:
                return f"{name} differs by {off / scale:.1e}"
        return None


def _observe(model: Any) -> dict[str, Tensor]:
    """Everything that is compared, by name."""
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % ROWS
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, -1:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    seen = {"loss": loss.detach()}
    seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        seen["logits"] = model(input_ids=ids, use_cache=False, logits_to_keep=3).logits
        places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        seen["logits of packed rows"] = model(input_ids=ids[:1], position_ids=places, use_cache=False).logits
        if not isinstance(model.model, _Body):
            cache = DynamicCache(config=model.config)
            for some in ids.split([LENGTH - 2, 1, 1], dim=1):
                seen["logits with a cache"] = model(input_ids=some, past_key_values=cache, use_cache=True).logits
    return seen


def _tiny_config() -> Gemma3nTextConfig:
    given: dict[str, Any] = {
        "vocab_size": ROWS, "vocab_size_per_layer_input": ROWS, "hidden_size": WIDTH, "intermediate_size": 24,
        "hidden_size_per_layer_input": 4, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "laurel_rank": 4, "sliding_window": 3, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 3, "altup_active_idx": 1,
        "altup_coef_clip": 0.2, "attn_implementation": "sdpa",
    }  # fmt: skip
    return Gemma3nTextConfig(**given)


def _tiny_model() -> nn.Module:
    return modeling_gemma3n.Gemma3nForCausalLM(_tiny_config()).train()


class _Body(nn.Module):
    """In place of the model behind a multimodal head, whose code no fused class repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return modeling_gemma3n.Gemma3nModelOutputWithPast(last_hidden_state=self.embed(input_ids))


def _head_without_towers() -> nn.Module:
    cls = modeling_gemma3n.Gemma3nForConditionalGeneration
    head: Any = cls.__new__(cls)
    PreTrainedModel.__init__(head, Gemma3nConfig(text_config=_tiny_config().to_dict()))
    head.model, head.lm_head = _Body(), nn.Linear(WIDTH, ROWS, bias=False)
    return head.train()


def warning_text(refused: dict[str, str]) -> str:
    """What is said of classes that altup does not replace: {name: why}."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    lost = "; ".join(dict.fromkeys(BRINGS[name] for name in refused))
    return (
        f"altup.accelerate: transformers {transformers.__version__} computes {', '.join(refused)} in a way that "
        f"altup does not know, so these parts run the original code. Lost: {lost}. Everything works with "
        f"transformers {TESTED}. The differences: {reasons}"
    )
