"""Models with a habit that once broke `widen`: each is widened, trained, saved, loaded and narrowed.

- FNet maps the embeddings by a square matrix before its layers: wide on both sides.
- DeBERTa 2 and 3 read a table as wide as the state with the matrices that read the state.
- Blenderbot's decoder takes the first part of whatever tuple a layer hands it.
- Llama 3.2's image encoder calls its layers by an argument's older name.
- GPT-OSS calls its attention by keywords, and all that it holds itself is a vector, as a norm does.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import altup
from altup.core.errors import UserError
from tests.models.widening.families import DECODER, ENCODER

RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
RELATIVE |= {"type_vocab_size": 0, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True}
SIZES = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 3), ("ffn_dim", 48))}
SIZES |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}

ODD = {
    "fnet": lambda: hf.FNetForMaskedLM(
        hf.FNetConfig(**{k: v for k, v in ENCODER.items() if k != "num_attention_heads"})
    ),
    "deberta-v3": lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**ENCODER, **RELATIVE)),
    "deberta-v3 with small tables": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**ENCODER, **RELATIVE, embedding_size=16)
    ),
    "blenderbot": lambda: hf.BlenderbotForConditionalGeneration(
        hf.BlenderbotConfig(vocab_size=ENCODER["vocab_size"], d_model=32, **SIZES)
    ),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def logits(model):
    ids = torch.arange(27).reshape(3, 9) % 40 + 3
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    arguments = {} if model.config.model_type == "fnet" else {"attention_mask": mask}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids[:, :5]
    return model(input_ids=ids, **arguments).logits


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("name", ODD)
def test_a_whole_life(name, method, tmp_path):
    torch.manual_seed(0)
    model = ODD[name]().eval()
    wide = altup.widen(copy.deepcopy(model), method, num_blocks=2)
    torch.testing.assert_close(logits(wide), logits(model), atol=1e-5, rtol=1e-4)

    narrow = altup.narrow(copy.deepcopy(wide)).state_dict()
    assert all(torch.equal(narrow[key], value) for key, value in model.state_dict().items())

    optimizer = torch.optim.SGD(wide.parameters(), 0.1)
    logits(wide).square().mean().backward()
    optimizer.step()
    wide.save_pretrained(tmp_path)
    assert torch.equal(logits(altup.load_widened(tmp_path).eval()), logits(wide))


class TwoReaders(hf.BertForMaskedLM):
    """Its head reads something narrow first and the state after it, with the same matrix."""

    def forward(self, input_ids, **options):
        dense = self.cls.predictions.transform.dense
        narrow = dense(torch.ones(1, 32))
        output = super().forward(input_ids, **options)
        output.logits = output.logits + narrow.sum()
        return output


def test_a_matrix_that_reads_wide_and_narrow_is_refused_before_it_breaks():
    model = TwoReaders(hf.BertConfig(**ENCODER)).eval()
    before = logits(model)
    with pytest.raises(UserError, match=r"TwoReaders cannot be widened.*method='recycled'"):
        altup.widen(model, "altup")
    assert torch.equal(logits(model), before)
    altup.widen(model, "recycled")


def test_a_second_state_that_only_generation_shows():
    """XLNet writes text with a second stream through its layers: narrow it fits, wide it would fail later."""
    torch.manual_seed(0)
    config = hf.XLNetConfig(vocab_size=60, d_model=32, n_layer=3, n_head=4, d_inner=48)
    model = hf.XLNetLMHeadModel(config).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    asked = {"max_new_tokens": 4, "do_sample": False}
    text = model.generate(ids, **asked)
    with pytest.raises(UserError, match="recycled"):
        altup.widen(model, "altup")
    wide = altup.widen(copy.deepcopy(model), "recycled")
    assert torch.equal(wide.generate(ids, **asked), text)
    assert torch.equal(model.generate(ids, **asked), text)


def test_layers_that_are_called_by_an_older_name_of_their_argument():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "attention_heads": 4, "image_size": 28, "patch_size": 14}
    layers = {"num_hidden_layers": 3, "num_global_layers": 2, "intermediate_layers_indices": [0, 2]}
    config = hf.models.mllama.MllamaVisionConfig(
        **sizes, **layers, max_num_tiles=1, supported_aspect_ratios=[[1, 1]]
    )
    model = hf.MllamaVisionModel(config).eval()
    ones = torch.ones(1, 1, dtype=torch.long)
    images = {"pixel_values": torch.randn(1, 1, 1, 3, 28, 28), "aspect_ratio_ids": ones}
    images["aspect_ratio_mask"] = ones[None]
    before = model(**images).last_hidden_state
    wide = altup.widen(model, "recycled", example=images)
    torch.testing.assert_close(wide(**images).last_hidden_state, before, atol=1e-5, rtol=1e-4)
