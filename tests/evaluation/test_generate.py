"""Prompts: a T5 fills gaps with what it wrote after their sentinels; a BERT and a decoder know a text by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from altup import (
    AltUpBertConfig,
    AltUpBertForMaskedLM,
    AltUpDecoderConfig,
    AltUpDecoderForCausalLM,
    load_widened,
    widen,
)
from altup.core.errors import UserError
from altup.data.tokenizer import save, train
from altup.evaluation.generate import (
    Continuation,
    answer_prompts,
    continue_text,
    fill_masks,
    fill_spans,
    remarks_on_answers,
    remarks_on_prompts,
)
from tests.processes import prepare_text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare_text(tmp_path_factory.mktemp("data"), 500) / "tokenizer")


class Says:
    """A model that answers every prompt with the same text, as `generate` would: start token first, padded."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        ids = [[0, *tokenizer(answer).input_ids] for answer in answers]
        width = max(map(len, ids)) + 2
        self.answers = torch.tensor([row + [0] * (width - len(row)) for row in ids])

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        assert len(input_ids) == len(self.answers)
        return self.answers


def filled(tokenizer: Any, prompt: str, answer: str) -> str:
    (pieces,) = fill_spans(Says(tokenizer, answer), tokenizer, [prompt])
    return "".join(text for text, _ in pieces)


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("a <extra_id_0> b", "<extra_id_0> dun mor", "a dun mor b"),
        ("<extra_id_0> a <extra_id_1>.", "<extra_id_0> dun <extra_id_1> mor lib", "dun a mor lib."),
        ("<extra_id_1> a <extra_id_0>", "<extra_id_0> dun <extra_id_1> mor", "mor a dun"),  # by number, not place
        ("a <extra_id_0> b <extra_id_1> c", "<extra_id_0> dun", "a dun b  c"),  # nothing for the second gap
        ("a <extra_id_0>", "<extra_id_0> dun <extra_id_0> mor", "a dun"),  # the first answer counts
        ("a <extra_id_0>", "lib <extra_id_0> dun", "a dun"),  # what comes before any sentinel fills no gap
        ("a b", "<extra_id_0> dun", "a b dun"),  # no gap: continued
    ],
)
def test_gaps(tokenizer: Any, prompt: str, answer: str, expected: str) -> None:
    assert filled(tokenizer, prompt, answer) == expected


def test_pieces_say_what_was_filled_in(tokenizer: Any) -> None:
    answers = ["<extra_id_0> dun", "<extra_id_0> mor lib"]
    found = fill_spans(Says(tokenizer, *answers), tokenizer, ["a <extra_id_0> b", "c"])
    assert found == [[("a ", False), ("dun", True), (" b", False)], [("c ", False), ("mor lib", True)]]


def test_a_gap_without_an_answer_is_an_empty_piece_and_is_told(tokenizer: Any) -> None:
    prompts = ["a <extra_id_0> b <extra_id_1> c", "a <extra_id_0>"]
    found = fill_spans(Says(tokenizer, "<extra_id_0> dun", "mor"), tokenizer, prompts)
    assert found[0] == [("a ", False), ("dun", True), (" b ", False), ("", True), (" c", False)]
    assert found[1] == [("a ", False), ("", True)]
    assert remarks_on_answers(prompts, found) == [
        "'a <extra_id_0> b <extra_id_1> c': the model wrote nothing for 1 of 2 gaps",
        "'a <extra_id_0>': the model wrote nothing",
    ]


def test_prompts_that_do_not_suit_a_family_are_told() -> None:
    prompts = ["a <extra_id_0>", "b", "c [MASK]"]
    assert [told.split(" has ")[0] for told in remarks_on_prompts("span-corruption", prompts, None)] == [
        "'b'",
        "'c [MASK]'",
    ]
    assert [told.split(" has ")[0] for told in remarks_on_prompts("masked", prompts, "[MASK]")] == ["'b'"]
    (told,) = remarks_on_prompts("causal", prompts, None)
    assert told.startswith("'a <extra_id_0>' has a gap, but this model is a decoder")


def test_a_sentinel_that_is_not_there(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"<extra_id_777> is not in this model's vocabulary"):
        filled(tokenizer, "a <extra_id_777>", "")


def test_a_real_model_fills_in(tokenizer: Any, tmp_path: Path) -> None:
    from tests.training.tiny import build

    model = build(vocab_size=len(tokenizer) + 28).eval()
    options = {"max_new_tokens": 5, "do_sample": False}
    one = fill_spans(model, tokenizer, ["dun <extra_id_0> mor"], **options)
    both = fill_spans(model, tokenizer, ["dun <extra_id_0> mor", "dun mor lib a b c"], **options)
    assert one[0] == both[0]


TEXT = "the quick brown fox jumps over the lazy dog while seven wizards boil one jug of bitter tea"
SHAPE = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The tokenizer of the text that is learnt by heart."""
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


def test_a_decoder_goes_on(learnt):
    torch.manual_seed(0)
    config = AltUpDecoderConfig.from_preset("tiny", "recycled", vocab_size=len(learnt), **SHAPE)
    model = AltUpDecoderForCausalLM(config)
    ids = torch.tensor([[1, *learnt(TEXT)["input_ids"]]])
    learn(model, lambda: {"input_ids": ids, "labels": ids}, 60)
    begun, whole = continue_text(model, learnt, ["the quick brown", TEXT[:60]], max_new_tokens=80, do_sample=False)
    assert "".join(text for text, _ in begun) == TEXT
    assert begun[0] == ("the quick brown", False)
    assert "".join(text for text, _ in whole) == TEXT

    pieces: list[str] = []
    options = {"max_new_tokens": 80, "do_sample": False, "stream": pieces.append}
    (streamed,) = continue_text(model, learnt, ["the quick brown"], **options)
    assert streamed == begun
    assert "".join(pieces) == begun[1][0]
    assert len(pieces) > 5


def test_half_a_character_is_not_streamed(learnt):
    """One that the vocabulary has not is several tokens, one a byte."""
    pieces: list[str] = []
    row, more = (learnt(text, add_special_tokens=False)["input_ids"] for text in ("tea", "tea ☕ tea"))
    streamer = Continuation(learnt, row, pieces.append)
    streamer.put(torch.tensor([row]))
    for token in more[len(row) :]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == " ☕ tea"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_without_a_mask_is_refused():
    class Bare:
        mask_token = None

        def get_vocab(self):
            return {}

    with pytest.raises(ValueError, match="neither a mask token nor <extra_id_0>"):
        fill_masks(None, Bare(), ["a"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1e-300}, "temperature=1e-300 is almost 0"),
        ({"top_k": 0}, "top_k=0 makes no sense"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 0.9, "temperature": 0.0}, "temperature 0 samples nothing"),
        ({"seed": 2**64}, "seed=18446744073709551616 makes no sense"),
        ({"prompts": ["a \udcff"]}, "is not UTF-8"),
    ],
)
def test_what_cannot_be_answered(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        answer_prompts(tmp_path, **{"prompts": ["a"], **options})


@pytest.mark.parametrize("kind", ["gpt2", "widened", "bert"])
def test_models_of_transformers_answer_too(tokenizer: Any, tmp_path: Path, kind: str) -> None:
    """A GPT-2 has no padding token, and a widened Llama is read by `load_widened` alone."""
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rows = {"vocab_size": 768, "eos_token_id": 1, "bos_token_id": 1}
    model: Any
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**rows, n_embd=16, n_layer=2, n_head=2))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**rows, **shape))
    else:
        model = widen(transformers.LlamaForCausalLM(transformers.LlamaConfig(**rows, **shape)), "altup", 2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model.eval()
    answers = answer_prompts(tmp_path, ["dun mor", "dun"], max_new_tokens=4)
    if kind == "bert":
        assert answers == fill_masks(model, tokenizer, ["dun mor", "dun"])
        with pytest.raises(UserError, match="remove temperature, top_k"):
            answer_prompts(tmp_path, ["dun"], top_k=2)
    else:
        loaded = load_widened(tmp_path) if kind == "widened" else model
        assert answers == continue_text(loaded, tokenizer, ["dun mor", "dun"], max_new_tokens=4, do_sample=False)
        assert all(answer[1][0] for answer in answers)
        for alone in ({"top_k": 1}, {"top_p": 1e-6}):  # samples from the likeliest token alone
            assert answer_prompts(tmp_path, ["dun mor", "dun"], max_new_tokens=4, **alone) == answers
        free = answer_prompts(tmp_path, ["dun mor", "dun"], max_new_tokens=4, temperature=1.0, seed=1)
        assert free != answers
