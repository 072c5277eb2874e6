from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from altup.core.errors import UserError
from altup.training.tensor_files import DTYPES, TensorFiles, TensorWriter, put


def test_a_written_file_is_safetensors_with_this_hash(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "ünicode": torch.eye(3)[:, ::2]}
    writer = TensorWriter(tmp_path / "a.safetensors", tensors)
    for tensor in tensors.values():
        writer.write(tensor)
    entry = writer.close()
    content = (tmp_path / "a.safetensors").read_bytes()
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_file_and_several_read_alike(tmp_path: Path) -> None:
    one, other = {"a": torch.randn(7, 3), "s": torch.tensor(2.0)}, {"b": torch.arange(5)}
    save_file({**one, **other}, tmp_path / "whole.safetensors")
    save_file(one, tmp_path / "cut-1.safetensors")
    save_file(other, tmp_path / "cut-2.safetensors")
    places = {**dict.fromkeys(one, "cut-1.safetensors"), **dict.fromkeys(other, "cut-2.safetensors")}
    (tmp_path / "cut.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for stem in ("whole", "cut"):
        files = TensorFiles(tmp_path, stem)
        assert {name: (stored.shape, stored.dtype) for name, stored in files.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in {**one, **other}.items()
        }
        assert torch.equal(files["a"][2:5], one["a"][2:5])
        assert torch.equal(files["s"][...], one["s"])
        filled = torch.zeros(7, 3)
        put(filled, files["a"])
        assert torch.equal(filled, one["a"])


@pytest.mark.parametrize(
    "text", ["[]", "{}", "{bad", '{"weight_map": {"a": "../a"}}', '{"weight_map": {"a": "no"}}']
)
def test_an_index_that_leads_nowhere_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(text)
    (tmp_path / "no").write_bytes(b"pickle")
    with pytest.raises(UserError):
        TensorFiles(tmp_path, "m")
