from __future__ import annotations

import json
from pathlib import Path

from altup.data.bad_input import BadInput
from altup.data.embedded import Embedded
from altup.data.files import LocalFiles
from altup.data.hub import HubDataset
from altup.data.sources import Chain, open_source


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
