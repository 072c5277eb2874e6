"""Gaps are filled with what the model wrote after their sentinels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError
from altup.evaluation.filling import fill_spans
from tests.training.verbs import prepare_text


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
