"""Prompts to a BERT and a decoder that have learnt a text by heart."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from altup import AltUpBertConfig, AltUpBertForMaskedLM, AltUpDecoderConfig, AltUpDecoderForCausalLM
from altup.data.tokenizer import save, train
from altup.evaluation.prompting import continue_text, fill_masks

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards boil one jug of bitter tea"
SHAPE = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save(train([TEXT] * 50, 361), folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def learn(model, batch, steps):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_a_bert_fills_in():
    """With a tokenizer of whole words, so that one gap holds one word; its gaps may be written as sentinels."""
    torch.manual_seed(0)
    special = {"pad_token": "[PAD]", "sep_token": "[SEP]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    names = [*special.values(), *sorted(set(TEXT.split()))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    model = AltUpBertForMaskedLM(AltUpBertConfig.from_preset("tiny", "altup", vocab_size=128, **SHAPE))
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]]).repeat(8, 1)

    def batch():
        hidden = torch.rand(ids.shape) < 0.3
        return {"input_ids": ids.masked_fill(hidden, 2), "labels": ids.masked_fill(~hidden, -100)}

    learn(model, batch, 60)
    gaps = TEXT.replace("quick", "<extra_id_0>").replace("wizards", "[MASK]")
    filled, longer = fill_masks(model, tokenizer, [gaps, TEXT.removesuffix(" tea")])
    assert "".join(text for text, _ in filled) == TEXT
    assert [text for text, was_gap in filled if was_gap] == ["quick", "wizards"]
    assert longer == [(TEXT.removesuffix("tea"), False), ("tea", True)]


def test_a_decoder_goes_on(tokenizer):
    torch.manual_seed(0)
    config = AltUpDecoderConfig.from_preset("tiny", "recycled", vocab_size=len(tokenizer), **SHAPE)
    model = AltUpDecoderForCausalLM(config)
    ids = torch.tensor([[1, *tokenizer(TEXT)["input_ids"]]])
    learn(model, lambda: {"input_ids": ids, "labels": ids}, 60)
    begun, whole = continue_text(
        model, tokenizer, ["the quick brown", TEXT[:60]], max_new_tokens=80, do_sample=False
    )
    assert "".join(text for text, _ in begun) == TEXT
    assert begun[0] == ("the quick brown", False)
    assert "".join(text for text, _ in whole) == TEXT


def test_a_tokenizer_without_a_mask_is_refused(tokenizer):
    class Bare:
        mask_token = None

        def get_vocab(self):
            return {}

    with pytest.raises(ValueError, match="neither a mask token nor <extra_id_0>"):
        fill_masks(None, Bare(), ["a"])
