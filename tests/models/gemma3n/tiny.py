"""A Gemma 3n of a few thousand weights, none of them at a value where a gradient vanishes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModel,
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nForConditionalGeneration,
    Gemma3nTextConfig,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gemma3n import modeling_gemma3n

import altup

ROWS = 40  # of the vocabulary
VISION, AUDIO = 40, 48  # where the ids of the other senses begin
IMAGE = 4  # tokens of an image


def tiny_config(K: int = 3, active: int = 0, layers: int = 4, **more: Any) -> Gemma3nTextConfig:
    """Sliding and full attention, of four layers two that share the keys of the others, a sparse feed-forward."""
    given = {
        "vocab_size": ROWS,
        "vocab_size_per_layer_input": ROWS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "hidden_size_per_layer_input": 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "laurel_rank": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "num_kv_shared_layers": layers // 4 * 2,
        "activation_sparsity_pattern": [0.5] + [0.0] * (layers - 1),
        "final_logit_softcapping": 2.0,
        "altup_num_inputs": K,
        "altup_active_idx": active,
        **more,
    }
    return Gemma3nTextConfig(**given)


def tiny_gemma(K: int = 3, active: int = 0, layers: int = 4, **more: Any) -> Gemma3nForCausalLM:
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(tiny_config(K, active, layers, **more))
    stir(model)
    return model.train()


class Tower(torch.nn.Module):
    """In place of the tower for images, which needs timm: a map from pixels to features."""

    def __init__(self) -> None:
        super().__init__()
        self.map = torch.nn.Conv2d(3, 16, 2, stride=2)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> Any:
        return BaseModelOutput(last_hidden_state=self.map(pixel_values))


def tiny_multimodal(monkeypatch: Any, layers: int = 2, **more: Any) -> Gemma3nForConditionalGeneration:
    """With a stand-in for the vision tower; the audio tower is transformers' own."""
    build = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        return Tower() if "vision" in type(config).__name__.lower() else build(config, **options)

    monkeypatch.setattr(modeling_gemma3n.AutoModel, "from_config", from_config)
    torch.manual_seed(0)
    text = tiny_config(layers=layers, vocab_size=56, vocab_size_per_layer_input=40, **more)
    audio = {
        "hidden_size": 16, "input_feat_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2,
        "conf_attention_chunk_size": 4, "conf_attention_context_left": 5, "vocab_size": 8, "vocab_offset": AUDIO,
        "sscp_conv_channel_size": [8, 4],
    }  # fmt: skip
    config = Gemma3nConfig(
        text_config=text.to_dict(), vision_config={"hidden_size": 16, "vocab_size": 8, "vocab_offset": VISION},
        audio_config=audio, image_token_id=VISION, audio_token_id=AUDIO, audio_soft_tokens_per_image=4,
        vision_soft_tokens_per_image=IMAGE,
    )  # fmt: skip
    model = Gemma3nForConditionalGeneration(config)
    stir(model)
    return model.train()


def image_batch(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Text with an image of four tokens in each row."""
    data = batch(rows, length)
    data["input_ids"][:, 3 : 3 + IMAGE] = VISION
    data["labels"][:, 3 : 3 + IMAGE] = -100
    return data | {"pixel_values": torch.randn(rows, 3, 4, 4)}


@torch.no_grad()
def stir(model: torch.nn.Module) -> None:
    """Random weights: a fresh model has zeros and ones in many places."""
    for name, p in model.named_parameters():
        p.add_(torch.randn_like(p) * (4.0 if "modality_router" in name else 0.3))


def plain_batch(seed: int, rows: int = 2, length: int = 7) -> dict[str, Any]:
    """Tokens and labels alone, as a recorded call wants them."""
    ids = torch.randint(3, ROWS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def batch(rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """With labels, one of which does not count."""
    torch.manual_seed(1)
    ids = torch.randint(3, ROWS, (rows, length))
    labels = ids.clone()
    labels[0, 2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def accelerated(model: Any, implementation: str = "plain", **options: Any) -> Any:
    """A copy with our code."""
    return altup.accelerate(copy.deepcopy(model), implementation=implementation, **options)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def gradients(model: Any, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and every parameter's gradient by name."""
    model.zero_grad()
    loss = model(**data).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same(model: Any, ours: Any, data: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Loss and every gradient. A small one, in either mostly rounding, is compared with the largest one."""
    loss, want = gradients(model, data)
    our_loss, got = gradients(ours, data)
    assert distance(our_loss, loss) < tolerance
    assert got.keys() == want.keys()
    largest = max(g.norm().item() for g in want.values() if g is not None)
    for name, exact in want.items():
        if exact is None:
            assert got[name] is None, name
            continue
        scale = max(exact.norm().item(), 1e-2 * largest)
        assert (got[name].double() - exact.double()).norm().item() < tolerance * scale, name
