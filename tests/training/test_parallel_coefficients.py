"""Coefficients under FSDP2 with bf16 parameters: float32 in storage and in use."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from altup.nn import CoefficientModule
from altup.training.parallel import ProcessGroup, leave, spread
from tests.models.helpers import batch, tiny_t5


def work(rank, address, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = spread(
        tiny_t5("altup+sequence-altup+moe").train(), "fsdp", True, ProcessGroup(rank, 2, torch.device("cpu"))
    )
    used = {}

    def remember(name):
        def hook(module, _inputs):
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


def test_coefficients_stay_float32(tmp_path):
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(f"file://{tmp_path}/meeting", results), nprocs=2)
    seen = results.get()
    assert seen["in use"] == {"torch.float32"}
    assert seen["others in use"] == {"torch.bfloat16"}
    assert seen["stored"] == seen["gradients"] == {"torch.float32"}
    assert any("AltUpUpdate" in kind for kind in seen["kinds"])
    assert any("SequenceUpdate" in kind for kind in seen["kinds"])
    assert any("Router" in kind for kind in seen["kinds"])
