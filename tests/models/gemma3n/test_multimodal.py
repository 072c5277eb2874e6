"""Gemma 3n with vision and audio: the text model inside is accelerated; what reaches it stays as it was."""

from __future__ import annotations

import pytest
import torch

import altup
from altup.models.gemma3n.fixed_cache import FixedCache
from altup.models.gemma3n.parts import Fused, FusedNorm
from tests.models.gemma3n.tiny import AUDIO, VISION, accelerated, assert_same, distance, tiny_multimodal


@pytest.fixture
def model(monkeypatch):
    return tiny_multimodal(monkeypatch)


def spoken():
    """Text, four places for sound, and half a second of it."""
    torch.manual_seed(1)
    ids = torch.randint(3, VISION, (2, 9))
    ids[:, 2:6] = AUDIO
    labels = torch.where(ids < VISION, ids, -100)
    mask = torch.ones(2, 48, dtype=torch.bool)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(2, 48, 16),
        "input_features_mask": mask,
        "labels": labels,
    }


def test_loss_and_all_gradients(model):
    data = spoken()
    ours = accelerated(model)
    assert isinstance(ours, Fused)
    assert isinstance(ours.model.language_model, Fused)
    heard = [part for part in ours.model.audio_tower.modules() if isinstance(part, Fused)]
    assert heard
    assert all(isinstance(part, FusedNorm) for part in heard)
    assert_same(model, ours, data)
    assert ours(**data).logits is None
    assert ours(**data).audio_hidden_states is not None


@torch.no_grad()
def test_evaluation_and_generate(model):
    data = {name: value for name, value in spoken().items() if name != "labels"}
    ours = accelerated(model.eval())
    assert distance(ours(**data).logits, model(**data).logits) < 1e-5
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(**data, **greedy)
    assert torch.equal(ours.generate(**data, **greedy), want)
    cache = FixedCache(model.config.get_text_config(), want.shape[1])  # as a GPU does it
    assert torch.equal(ours.generate(**data, **greedy, past_key_values=cache), want)
    altup.decelerate(ours)
    assert torch.equal(ours(**data).logits, model(**data).logits)
