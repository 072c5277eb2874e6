from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from altup.core.errors import UserError
from altup.data.bad_input import BadInput
from altup.data.embedded import Embedded
from altup.data.prepare import Recipe, prepare
from altup.data.shards import TokenStream
from altup.data.sources import Chain, HubDataset, open_source
from altup.data.text_files import LocalFiles


def test_names_of_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert isinstance(open_source(str(tmp_path)), LocalFiles)
    assert isinstance(open_source("embedded"), Embedded)
    c4 = open_source("hf:allenai/c4:en:validation", field="body")
    assert isinstance(c4, HubDataset)
    assert (c4.name, c4.config, c4.split, c4.field) == ("allenai/c4", "en", "validation", "body")


def test_a_chain_goes_on_from_any_cursor_and_knows_how_far_it_is(tmp_path: Path) -> None:
    for name in "abc":
        lines = [json.dumps({"text": f"{name}{i}"}) for i in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    chain = Chain([LocalFiles(tmp_path / f"{name}.jsonl") for name in "abc"])
    whole = list(chain.read(BadInput()))
    assert whole == [f"{name}{i}" for name in "abc" for i in range(5)]
    reader, fractions = chain.read(BadInput()), []
    for count, _ in enumerate(reader, start=1):
        cursor = json.loads(json.dumps(reader.cursor()))
        assert list(chain.read(BadInput(), cursor)) == whole[count:]
        fractions.append(reader.fraction() or 0.0)
    assert fractions == sorted(fractions)
    assert reader.fraction() == 1.0
    assert list(chain.read(BadInput(), reader.cursor())) == []


TEXTS = [f"record {i} " + "word " * (i % 5) for i in range(57)]


@pytest.fixture(params=["saved", "saved-splits", "folder"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubDataset:
    """The same records as a saved dataset, as a saved dictionary of splits, and as files `load_dataset` reads."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    if request.param == "saved":
        data.save_to_disk(folder, num_shards=3)
    elif request.param == "saved-splits":
        datasets.DatasetDict({"train": data}).save_to_disk(folder)
    else:
        folder.mkdir()
        for part in range(3):
            lines = [json.dumps({"text": text}) for text in TEXTS[part * 19 : part * 19 + 19]]
            (folder / f"train-{part}.jsonl").write_text("\n".join(lines))
    found = open_source(f"hf:{folder}")
    assert isinstance(found, HubDataset)
    return found


def test_every_record_in_order(dataset: HubDataset) -> None:
    assert list(dataset.read(BadInput())) == TEXTS


def test_reading_goes_on_from_any_cursor(dataset: HubDataset) -> None:
    reader = dataset.read(BadInput())
    for count, _ in enumerate(reader, start=1):
        if count % 8 == 3 or count in (19, 57):
            cursor = json.loads(json.dumps(reader.cursor()))
            assert list(dataset.read(BadInput(), cursor)) == TEXTS[count:]


def test_bad_records_are_counted_or_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["one", "", None, "two"]})
    data.save_to_disk(tmp_path / "set")
    bad_input = BadInput()
    assert list(HubDataset(str(tmp_path / "set")).read(bad_input)) == ["one", "two"]
    assert {reason: seen["count"] for reason, seen in bad_input.state().items()} == {
        "empty document": 1,
        "no text field": 1,
    }
    with pytest.raises(UserError, match="record 2"):
        list(HubDataset(str(tmp_path / "set")).read(BadInput("stop")))


def test_a_dataset_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"nobody/nothing.*cannot be opened"):
        HubDataset("nobody/nothing").read(BadInput())
    with pytest.raises(UserError, match="names no dataset"):
        open_source("hf:")


def test_preparing_goes_on_in_the_middle_of_a_dataset(prepared: Path, prose: list[str], tmp_path: Path) -> None:
    """The same tokens as from a file; and after the loss of a shard, again."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": prose}).save_to_disk(tmp_path / "set", num_shards=4)
    chosen = Recipe(
        [HubDataset(str(tmp_path / "set"))],
        validation_fraction=0.1,
        tokenizer=str(prepared / "tokenizer"),
        shard_tokens=7_001,
    )
    out = tmp_path / "data"
    prepare(out, chosen, workers=1)
    expected = TokenStream(prepared)
    for _ in range(2):
        made = TokenStream(out)
        assert np.array_equal(made.read(0, len(made)), expected.read(0, len(expected)))
        (out / "train-00004.bin").unlink()
        prepare(out, chosen, workers=2)


def test_a_pipe_and_no_name_at_all_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="a pipe, a socket or a device"):
        open_source(str(tmp_path / "pipe.txt"))
    with pytest.raises(UserError, match="source '' names nothing"):
        open_source("")
