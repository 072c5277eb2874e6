"""Sharded models: their weights are made, written and read in parts, by ranks (Gloo, CPU) that are forked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from altup.training.config import TrainConfig
from altup.training.deferred import defer_weights
from altup.training.engine import Engine
from altup.training.optimizers.state import named_state
from altup.training.parallel import ProcessGroup, distribute, full_tensor, leave
from altup.training.sharded import load_weights, weights_of, write_parts
from tests.processes import fork_two, server
from tests.torchrun import train_together
from tests.training.compare import assert_same_run
from tests.training.test_deferred import small
from tests.training.test_parallel import LONG, assert_close
from tests.training.tiny import run

CONFIG = TrainConfig(optimizer="muon", parallel="fsdp", precision="fp32")
BUILDS: dict[str, Callable[[], Any]] = {
    "t5": small("t5", "altup+sequence-altup+moe"),
    "tied": small("decoder", "altup", tie_word_embeddings=True),
    "bert": small("bert", "recycled"),
}


def differing(model: torch.nn.Module, plain: torch.nn.Module) -> list[str]:
    expected = dict(plain.named_parameters())
    names = [
        name for name, p in model.named_parameters() if not torch.equal(full_tensor(p.detach()), expected[name])
    ]
    return (names + sorted(expected.keys() ^ dict(model.named_parameters()).keys()))[:3]  # a pipe holds little


def make_write_and_read(rank: int, address: str, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    process_group = ProcessGroup(rank, 2, torch.device("cpu"))
    for name, build in BUILDS.items():
        torch.manual_seed(3)
        plain = build()
        torch.manual_seed(3)
        model, weights = defer_weights(build)
        engine = Engine(model, CONFIG, process_group, weights.fill)  # some optimizers look at the weights
        results.put((rank, name, "made", differing(model, plain)))
        alone = Engine(plain, CONFIG, ProcessGroup(0, 1, process_group.device))
        ours, theirs = (dict(named_state(e.optimizer, e.plain)) for e in (engine, alone))
        others = [n for n in theirs if not torch.allclose(full_tensor(ours[n]), theirs[n])]
        results.put((rank, name, "optimizer", (others + sorted(ours.keys() ^ theirs.keys()))[:3]))
        place = folder / name
        if rank == 0:
            plain.save_pretrained(folder / f"{name}-whole")
            plain.config.save_pretrained(place)
        process_group.barrier()
        results.put((rank, name, "files", list(write_parts(weights_of(model), place, "model", process_group))))
        again, _ = defer_weights(build, wanted=False)
        distribute(again, "fsdp", False, process_group)
        load_weights(again, place)
        results.put((rank, name, "read", differing(again, plain)))
        if rank == 0:
            results.put((rank, name, "loaded", differing(type(plain).from_pretrained(place), plain)))
    try:
        write_parts(weights_of(model), folder / ("not there" if rank else "tied"), "broken", process_group)
    except Exception as error:
        results.put((rank, "", "failed", [type(error).__name__, str(error)]))
    dist.barrier()
    leave()


def test_weights_are_made_written_and_read_in_parts(tmp_path: Path) -> None:
    """To the last bit, with tied weights, and as Hugging Face reads them; if one rank cannot write, both fail."""
    results = server.SimpleQueue()
    fork_two(make_write_and_read, f"file://{tmp_path}/meeting", tmp_path, results)
    found: dict[tuple[int, str, str], list[str]] = {}
    while not results.empty():
        *key, value = results.get()
        found[tuple(key)] = value
    for name in BUILDS:
        for rank in (0, 1):
            assert found[rank, name, "made"] == []
            assert found[rank, name, "optimizer"] == []
            assert found[rank, name, "read"] == []
            assert found[rank, name, "files"] == [f"model-{rank + 1:05d}-of-00002.safetensors"]
        assert found[0, name, "loaded"] == []
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        with safe_open(tmp_path / f"{name}-whole/model.safetensors", "pt") as whole:
            assert index["weight_map"].keys() == set(whole.keys())
    sizes = [path.stat().st_size for path in (tmp_path / "t5").glob("model-*.safetensors")]
    assert max(sizes) < 1.1 * min(sizes)  # each rank writes as much as the other
    assert found[1, "", "failed"][0] == "FileNotFoundError"
    assert found[0, "", "failed"] == ["UserError", "another process could not go on; its message says why"]


def memory(field: str) -> int:
    """In bytes. `RssAnon` leaves out what is mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_of_a_life(rank: int, address: str, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    process_group = ProcessGroup(rank, 2, torch.device("cpu"))
    build = small("decoder", "altup", d_model=512, d_ff=1536, num_heads=8, d_kv=64, num_layers=40)
    before, peak, ended = memory("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], memory("RssAnon") - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model, weights = defer_weights(build)
    distribute(model, "fsdp", False, process_group)
    weights.fill(model)
    made = peak[0]
    write_parts(weights_of(model), folder, "model", process_group)
    load_weights(model, folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ended.set()
    watcher.join()
    results.put((size, made, peak[0]))
    dist.barrier()
    leave()


@pytest.mark.slow
def test_no_process_holds_all_weights(tmp_path: Path) -> None:
    results = server.SimpleQueue()
    fork_two(peak_of_a_life, f"file://{tmp_path}/meeting", tmp_path, results)
    for _ in range(2):
        size, made, written = results.get()
        assert size > 400 * 2**20
        assert made < 0.65 * size
        assert written < 0.75 * size


@pytest.mark.slow
def test_two_ranks_then_three(tmp_path: Path) -> None:
    settings = {**LONG, "batch_size": 12}
    run(tmp_path / "alone", **settings)
    for world, more in ((2, {"settings": {**settings, "parallel": "fsdp", "stop_after": 8}}),
                        (3, {"settings": {**settings, "parallel": "fsdp"}, "resume": True})):  # fmt: skip
        cases = [{"out": f"{tmp_path}/runs/changed", **more}]
        train_together(Path(__file__).parent / "tiny.py", json.dumps(cases), out=tmp_path / "runs", world=world)
    assert (tmp_path / "runs/changed/final/model-00003-of-00003.safetensors").exists()
    assert_close(tmp_path / "alone", tmp_path / "runs/changed")


KILLED = """
import os, runpy, signal, sys
from altup.training import sharded
close, calls = sharded.TensorWriter.close, []

def kill_at(self):
    calls.append(close(self))
    if os.environ["RANK"] == sys.argv[3] and len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]

sharded.TensorWriter.close = kill_at
runpy.run_path(TINY, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("file", "rank"), [(1, 0), (1, 1), (2, 1), (3, 0), (4, 1), (7, 1)])
def test_a_kill_inside_a_save_costs_that_save_alone(tmp_path: Path, file: int, rank: int) -> None:
    """Files are closed in the order: model and optimizer of steps 5, 10 and 12, then the final model."""
    tiny, script = Path(__file__).parent / "tiny.py", tmp_path / "killed.py"
    script.write_text(KILLED.replace("TINY", repr(str(tiny))))
    case = {"settings": {"parallel": "fsdp", "micro_batch": 4}}
    train_together(tiny, json.dumps([{"out": f"{tmp_path}/whole/run", **case}]), out=tmp_path / "whole")
    out = tmp_path / "cut/run"
    with pytest.raises(AssertionError):
        train_together(script, json.dumps([{"out": str(out), **case}]), file, rank, out=tmp_path / "cut")
    assert not (out / "final").exists()
    cases = [{"out": str(out), "resume": out.joinpath("metrics.jsonl").stat().st_size > 0, **case}]
    train_together(tiny, json.dumps(cases), out=tmp_path / "cut")
    assert_same_run(tmp_path / "whole/run", out, 12)
    assert not list(out.glob("**/.unfinished*"))
