"""Models of transformers in our loop's terms: the loss as sums, the kind, and loading that makes nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from altup.core.errors import UserError
from altup.core.pretrained import load_config
from altup.models.foreign import answer_in_sums, keeps_texts_apart, kind_of, load_language_model, shift_right

WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ROWS = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "decoder":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDTHS, **ROWS)).eval()
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTHS, **ROWS)).eval()
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 3}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**shape, **heads, **ROWS)).eval()


def test_a_decoder_whose_config_names_no_start_begins_with_padding() -> None:
    config = transformers.T5Config(vocab_size=40, pad_token_id=0)
    inputs = shift_right(torch.tensor([[5, 6, -100]]), config)
    assert inputs.tolist() == [[0, 5, 6]]


@pytest.mark.parametrize("kind", ["t5", "bert", "decoder"])
def test_the_loss_is_transformers_own_as_a_sum(kind: str) -> None:
    """And the z-loss comes on top: z · Σ (log Σ exp logits)²."""
    model = build(kind)
    ids = torch.randint(2, 40, (3, 7))
    labels = torch.randint(2, 40, (3, 7))
    labels[:, 2] = -100
    given = {"labels": labels}
    if kind == "decoder":  # transformers shifts labels itself; ours come shifted
        given = {"labels": F.pad(labels, (1, 0), value=-100)[:, :-1], "shift_labels": labels}
    with torch.no_grad():
        theirs = model(input_ids=ids, **given)
        log_z = theirs.logits.logsumexp(-1)[labels != -100]
        name = "shift_labels" if kind == "decoder" else "labels"
        ours = answer_in_sums(model, 0.5)(input_ids=ids, **{name: labels}, return_logits=False)
    assert "logits" not in ours
    assert ours.num_tokens == 18
    torch.testing.assert_close(ours.nll_sum, theirs.loss * 18)
    torch.testing.assert_close(ours.loss_sum, theirs.loss * 18 + 0.5 * log_z.square().sum())
    right = (theirs.logits.argmax(-1) == labels).sum()
    assert ours.num_correct == right


@pytest.mark.parametrize("kind", ["t5", "bert", "decoder"])
def test_it_saves_as_the_class_it_is(tmp_path: Path, kind: str) -> None:
    model = build(kind)
    original = type(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer_in_sums(model, 0.0).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.architectures == [original.__name__]
    assert kind_of(config, tmp_path) == kind
    loaded = load_language_model(tmp_path, config)
    assert type(loaded) is original
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing or misshapen, first bert.encoder.layer.0"):
        load_language_model(tmp_path, load_config(tmp_path))


def test_a_causal_head_on_an_encoder_is_refused_unless_it_hides_what_comes_later(tmp_path: Path) -> None:
    """Every token would see its own label."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=30, architectures=["BertLMHeadModel"], **shape)
    with pytest.raises(UserError, match="see those behind them"):
        kind_of(config, tmp_path)
    config.is_decoder = True
    assert kind_of(config, tmp_path) == "decoder"


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2", "Lfm2", "Bloom", "OPT"])
def test_whether_packed_texts_are_kept_apart_is_found_by_trying(name: str) -> None:
    """Lfm2's convolutions reach two tokens back, Bloom's and OPT's positions are those in the row."""
    shape: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "pad_token_id": 0}
    more: dict[str, Any] = {
        "Mistral": {"sliding_window": 3, "num_key_value_heads": 2},
        "Lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
    }
    fields = {**shape, **more.get(name, {})}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config)
    assert keeps_texts_apart(answer_in_sums(model, 0.0)) == (name in ("Llama", "Mistral", "GPT2"))
