"""Two processes compute what one does. One launch of two ranks (Gloo, CPU) makes all the runs of this file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from altup.core.errors import UserError
from altup.nn import CoefficientModule
from altup.training.parallel import ProcessGroup, check_share, distribute, leave
from altup.training.prefetch import share
from tests.models.helpers import batch, tiny_t5
from tests.processes import fork_two, server
from tests.torchrun import train_together
from tests.training.compare import assert_same_bits, assert_same_run, records, weights
from tests.training.tiny import build, run, tiny_loop

# At a higher lr this small model amplifies rounding: at 0.02 the losses part by 2e-5 after 30 steps.
LONG = {
    **{"steps": 20, "lr": 0.005, "save_every": 20, "eval_every": 10, "log_every": 1},
    "model": {"dropout_rate": 0.0},
}
KINDS = ("ddp", "fsdp")


def train_cases(cases: list[dict[str, Any]], out: Path) -> None:
    train_together(Path(__file__).parent / "tiny.py", json.dumps(cases), out=out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each kind: `long`, `whole`, `cut` (stopped after 7 of 12 steps, resumed), `half` (stopped only), `one`
    (by one process for eight steps, by two for the others)."""
    folder = tmp_path_factory.mktemp("parallel")
    cases: list[dict[str, Any]] = []
    for kind in KINDS:
        run(folder / f"{kind}-one", **{**LONG, "parallel": kind, "stop_after": 8})
        base = {"parallel": kind, "micro_batch": 4}
        cases += [
            {"out": f"{folder}/{kind}-long", "settings": {**LONG, "parallel": kind}},
            {"out": f"{folder}/{kind}-whole", "settings": base},
            {"out": f"{folder}/{kind}-cut", "settings": {**base, "stop_after": 14}},
            {"out": f"{folder}/{kind}-cut", "settings": base, "resume": True},
            {"out": f"{folder}/{kind}-half", "settings": {**LONG, "parallel": kind, "stop_after": 8}},
            {"out": f"{folder}/{kind}-one", "settings": {**LONG, "parallel": kind}, "resume": True},
        ]
    train_cases(cases, folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "long"
    run(out, **LONG)
    return out


def assert_close(ours: Path, theirs: Path) -> None:
    one, two = records(ours), records(theirs)
    assert [(r["step"], r["split"]) for r in one] == [(r["step"], r["split"]) for r in two]
    assert one[-1]["step"] == LONG["steps"]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
        assert b["accuracy"] == pytest.approx(a["accuracy"], abs=0.005)
    for name, tensor in weights(ours).items():
        torch.testing.assert_close(weights(theirs)[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_launch_that_crashes_is_made_once_more(tmp_path: Path) -> None:
    """Once, from an empty folder, and not silently."""
    script, out, before = (tmp_path / name for name in ("crash.py", "out", "before"))
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "out, before, crashes = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])\n"
        "if os.environ['RANK'] == '1':\n"
        "    out.mkdir()\n"
        "    before.open('a').write('x')\n"
        "    if before.stat().st_size <= crashes:\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    with pytest.warns(UserWarning, match="crash.py"):
        train_together(script, out, before, 1, out=out)
    assert before.read_text() == "xx"
    shutil.rmtree(out)
    before.unlink()
    with pytest.warns(UserWarning, match="crash.py"), pytest.raises(AssertionError, match="Fatal Python error"):
        train_together(script, out, before, 2, out=out)
    assert before.read_text() == "xx"


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_losses_of_one(runs: Path, alone: Path, kind: str) -> None:
    assert_close(alone, runs / f"{kind}-long")


@pytest.mark.parametrize("kind", KINDS)
def test_resume_with_two_processes_is_exact(runs: Path, kind: str) -> None:
    """Also with accumulation and with dropout."""
    assert_same_run(runs / f"{kind}-whole", runs / f"{kind}-cut", 12)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_with_another_number_of_processes(runs: Path, alone: Path, kind: str) -> None:
    """Eight steps with two processes, the other twelve with one."""
    out = runs / f"{kind}-half"
    assert run(out, resume=True, **{**LONG, "parallel": kind}).finished
    assert_close(alone, out)
    assert_close(alone, runs / f"{kind}-one")


def test_a_final_model_of_other_files_is_known(runs: Path, tmp_path: Path) -> None:
    """Lost after a run of two processes and made again by one, it is not made a third time."""
    out = Path(shutil.copytree(runs / "fsdp-long", tmp_path / "run"))
    before = weights(out)
    shutil.rmtree(out / "final")
    assert run(out, resume=True, **{**LONG, "parallel": "fsdp"}).finished
    assert_same_bits(weights(out), before)
    made = (out / "final/model.safetensors").stat().st_mtime_ns
    assert run(out, resume=True, **{**LONG, "parallel": "fsdp"}).finished
    assert (out / "final/model.safetensors").stat().st_mtime_ns == made


def test_a_checkpoint_of_sharded_weights_is_an_ordinary_model(runs: Path) -> None:
    model = build(runs / "fsdp-long" / "final")
    assert type(model).__name__ == "AltUpT5ForConditionalGeneration"
    assert json.loads((runs / "fsdp-long/final/config.json").read_text())["architectures"] == [
        "AltUpT5ForConditionalGeneration"
    ]
    saved = weights(runs / "fsdp-long")
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved[name], tensor)
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_cover_a_micro_batch_once(world: int) -> None:
    everyone = [ProcessGroup(rank, world, torch.device("cpu")) for rank in range(world)]
    covered = [i for process_group in everyone for i in range(*share(24, process_group))]
    assert covered == list(range(24))


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UserError, match=r"micro_batch=8.*3 processes.*multiple of 3"):
        check_share(8, 3)


def forward_under_fsdp(rank: int, address: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = distribute(
        tiny_t5("altup+sequence-altup+moe").train(), "fsdp", True, ProcessGroup(rank, 2, torch.device("cpu"))
    )
    used: dict[str, set[torch.dtype]] = {}

    def remember(name: str) -> Any:
        def hook(module: torch.nn.Module, _inputs: Any) -> None:
            used[name] = {parameter.dtype for parameter in module.parameters(recurse=False)}

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(remember(name))
    model(**batch()).loss.backward()
    coefficients = {n for n, m in model.named_modules() if isinstance(m, CoefficientModule)}
    if rank == 0:
        results.put(
            {
                "in use": {str(d) for n in coefficients for d in used[n]},
                "others in use": {str(d) for n, dtypes in used.items() if n.endswith(".q") for d in dtypes},
                "stored": {str(p.dtype) for p in model.parameters()},
                "gradients": {str(p.grad.dtype) for p in model.parameters() if p.grad is not None},
                "kinds": sorted({type(m).__name__ for m in model.modules() if isinstance(m, CoefficientModule)}),
            }
        )
    dist.barrier()
    leave()


def test_coefficients_stay_float32(tmp_path: Path) -> None:
    """Under FSDP2 with bf16 parameters: in storage and in use."""
    results = server.SimpleQueue()
    fork_two(forward_under_fsdp, f"file://{tmp_path}/meeting", results)
    seen = results.get()
    assert seen["in use"] == {"torch.float32"}
    assert seen["others in use"] == {"torch.bfloat16"}
    assert seen["stored"] == seen["gradients"] == {"torch.float32"}
    assert any("AltUpUpdate" in kind for kind in seen["kinds"])
    assert any("SequenceUpdate" in kind for kind in seen["kinds"])
    assert any("Router" in kind for kind in seen["kinds"])


def train_until_the_folder_is_gone(rank: int, address: str, out: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    class Removes:
        def record(self, values: dict[str, Any]) -> None:
            if out.exists():
                shutil.rmtree(out)

        def close(self) -> None:
            pass

    rare = {"steps": 100_000, "save_every": 100_000, "eval_every": 100_000, "log_every": 10}
    loop = tiny_loop(out, ProcessGroup(rank, 2, torch.device("cpu")), **rare)
    loop.sinks = [Removes()]
    try:
        loop.run()
    except UserError as error:
        results.put(str(error))
    leave()


def test_all_processes_stop_when_the_folder_is_gone(tmp_path: Path) -> None:
    """Between two saves: none waits for the others."""
    results = server.SimpleQueue()
    fork_two(train_until_the_folder_is_gone, f"file://{tmp_path}/meeting", tmp_path / "run", results)
    assert all("the folder or its lock (.lock) was removed" in results.get() for _ in range(2))
    assert not (tmp_path / "run").exists()


METHODS = (
    *("dense", "altup", "sameup", "recycled", "sum", "dense-wide", "sequence-altup", "stride-and-skip"),
    *("average-pooling", "moe", "altup+moe", "altup+sequence-altup+moe"),
)


@pytest.mark.slow
def test_every_method_trains_in_parallel(tmp_path: Path) -> None:
    """Also in bf16, where coefficients must stay float32 under FSDP2."""
    cases, together = [], tmp_path / "together"
    for method in METHODS:
        model = {"method": method, "num_layers": 3, "dropout_rate": 0.0}
        if "moe" in method:
            model |= {"experts": 4, "expert_jitter": 0.0}
        settings: dict[str, Any] = {"steps": 5, "log_every": 1, "eval_every": 5, "model": model}
        for kind in KINDS:
            cases.append({"out": f"{together}/{method}-{kind}", "settings": {**settings, "parallel": kind}})
            bf16 = {**settings, "parallel": kind, "precision": "bf16"}
            cases.append({"out": f"{together}/{method}-{kind}-bf16", "settings": bf16})
        run(tmp_path / f"{method}-alone", **settings)
        run(tmp_path / f"{method}-alone-bf16", precision="bf16", **settings)
    train_cases(cases, together)
    for method in METHODS:
        for kind in KINDS:
            for suffix, tolerance in (("", 1e-5), ("-bf16", 0.02)):
                ours, theirs = tmp_path / f"{method}-alone{suffix}", together / f"{method}-{kind}{suffix}"
                losses = [[r["loss"] for r in records(path)] for path in (ours, theirs)]
                assert losses[1] == pytest.approx(losses[0], rel=tolerance), (method, kind, suffix)
