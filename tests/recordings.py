"""CUDA graphs without a GPU: as in real ones, what is recorded does not run, and a recording may fail."""

from __future__ import annotations

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from altup.core import errors
from altup.kernels import cuda_graph

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class _Watch(TorchDispatchMode):
    """Raises an error at the operation of that number, and remembers what operations write to.

    A FakeTensorMode leaves tensors alone, but for those of a single number.
    """

    def __init__(self, error, number):
        super().__init__()
        self.error, self.left = error, number
        self.before = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.error is not None and not self.left:
            raise self.error
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and not isinstance(value, FakeTensor):
                with _disable_current_modes():
                    self.before.append((value, value.clone()))
        return func(*args, **(kwargs or {}))

    def undo(self):
        for tensor, before in reversed(self.before):
            tensor.copy_(before)


class PretendedGraphs:
    """Stands in for what is called of `torch.cuda`, on a CPU. The recordings whose numbers are in `fail` do so at
    their third operation."""

    def __init__(self, monkeypatch, *modules):
        self.fail: dict[int, RuntimeError] = {}
        self.begun = 0  # recordings
        self.stream = self.main = self
        monkeypatch.setattr(errors, "WARNED", set())
        for module in (cuda_graph, *modules):
            monkeypatch.setattr(module, "can_record", lambda device: True)
        monkeypatch.setattr(cuda_graph, "_beside", lambda device: self)
        monkeypatch.setattr(cuda_graph.Replay, "__call__", lambda replay: replay.run())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.record)

    def wait_stream(self, stream):
        pass

    def pool(self):
        pass

    @contextlib.contextmanager
    def record(self, graph, pool=None, capture_error_mode="global"):
        self.begun += 1
        self.stream = "of the recording"
        watch = _Watch(self.fail.get(self.begun), number=3)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), watch:
                yield
        except torch.OutOfMemoryError:
            self.stream = self.main
            raise
        except RuntimeError:  # then PyTorch's own fails at its end, and its stream stays
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904
        finally:
            watch.undo()
        self.stream = self.main
