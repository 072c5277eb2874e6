"""In training, too, a widened model begins as the function it was: the same draws give the same outputs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import altup
from altup.models.widening.dropout import BlockDropout
from tests.models.widening.families import DECODER, ENCODER

IMAGES = {name: ENCODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
IMAGES |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.2}
T5 = {"vocab_size": 60, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4}
MODELS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGES)),
}


def draw(model: hf.PreTrainedModel, rows: int = 2) -> torch.Tensor:
    """The outputs of a training step."""
    torch.manual_seed(1)
    ids = torch.arange(6 * rows).reshape(rows, 6) % 40 + 3
    given = {"input_ids": ids}
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.randn(rows, 3, 16, 16)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :4]
    torch.manual_seed(2)
    return model.train()(**given).logits


@pytest.mark.parametrize("name", MODELS)
def test_with_the_same_draws_training_begins_with_the_same_outputs(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    before = draw(model)
    wide = altup.widen(copy.deepcopy(model), "altup", num_blocks=2)
    torch.testing.assert_close(draw(wide), before, atol=1e-5, rtol=1e-4)

    wide.save_pretrained(tmp_path)
    torch.testing.assert_close(draw(altup.load_widened(tmp_path)), before, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(draw(altup.widen(copy.deepcopy(wide), "altup", 4)), before, atol=1e-5, rtol=1e-4)
    narrow = altup.narrow(wide)
    assert not any(isinstance(module, BlockDropout) for module in narrow.modules())
    torch.testing.assert_close(draw(narrow), before, atol=1e-5, rtol=1e-4)


def test_recycled_leaves_dropout_alone():
    model = altup.widen(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), "recycled")
    assert not any(isinstance(module, BlockDropout) for module in model.modules())


def test_one_mask_for_all_blocks():
    dropout = nn.Dropout(0.5)
    dropout.__class__ = BlockDropout
    dropout.num_blocks, dropout.wide = 3, 24
    torch.manual_seed(0)
    first, *others = dropout(torch.ones(5, 24)).chunk(3, dim=-1)
    assert 0 < (first == 0).float().mean() < 1
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 2.0))
    assert torch.equal(dropout.eval()(torch.ones(5, 24)), torch.ones(5, 24))
    assert (dropout.train()(torch.ones(5, 8)) == 0).any()  # what is not the wide state is dropped as ever


def test_a_dropout_that_is_a_function_is_told():
    """It cannot be given one mask for all blocks. Those inside the layers, and of 0, are no matter."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 2}
    sizes |= {
        "vocab_size": 60,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "activation_dropout": 0.1,
    }

    def bart(p):
        return hf.BartForConditionalGeneration(hf.BartConfig(**sizes, dropout=p)).eval()

    with pytest.warns(UserWarning, match=r"drops of each block for itself .* with p=0\.3"):
        altup.widen(bart(0.3), "altup")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        altup.widen(bart(0.0), "altup")
        altup.widen(bart(0.3), "recycled")
        altup.widen(MODELS["gpt2"](), "altup")
    assert nn.functional.dropout.__module__ == "torch.nn.functional"
