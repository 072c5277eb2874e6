"""Calls of a model in anyone's loop, replayed as CUDA graphs: one for the forward pass, one for the backward pass.

A compiled layer takes the host about as long to launch as a GPU to run, so a fast model waits for its launches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from altup.kernels.cuda_graph import record, try_recording, warm_up

LAUNCHED = 2  # calls of one kind before one is recorded: they compile, and a shape may never come again
MOST = 16  # kinds of calls without gradients that are recorded
MOST_TRAINED = 4  # and of those with gradients, each of which holds all gradients
REMEMBERED = 1000  # kinds of calls that are counted: lengths may never come again
PLAIN = (bool, int, float, str, torch.dtype, type(None))


class RecordedCalls:
    """`model(*args, **kwargs)` by replaying what an earlier call of the same kind has recorded.

    A kind is the shapes of the tensors, all other arguments, and the mode: training, gradients, autocast. What is
    returned is a copy, so that it outlives the next call. All graphs share memory, as they never run at once:
    while a recorded forward pass waits for its backward pass, other calls are launched. Launched are also calls
    whose arguments or results hold more than tensors (a cache), and those of models with hooks, with recomputed
    layers (gradient checkpointing) or with sharded weights. Where weights have moved, all is recorded anew. Calls
    that build a graph for a backward pass are recorded `with_gradients` only. What does not fit into the memory,
    or does what a graph cannot hold, is launched from then on.

    With `skips_logits` a call in training that has labels is made with `return_logits=False`, unless it says
    otherwise. With `lends` the gradients that a backward pass gives are the graph's own, not copies: a large model
    holds them once. What is still some parameter's `grad` when the next call is replayed is copied then.

    On a CPU the same calls are made again instead of replayed.
    """

    def __init__(
        self, model: nn.Module, skips_logits: bool = False, with_gradients: bool = True, lends: bool = False
    ) -> None:
        self._model = weakref.ref(model)
        self.skips_logits, self.with_gradients, self.lends = skips_logits, with_gradients, lends
        self.replaced: Any = None  # the compiled call in whose place this one stands
        self._parts: list[tuple[nn.Module, list[int]]] = []
        self._parameters: list[nn.Parameter] = []
        self._weights: list[Any] = []
        self._seen: Counter[Any] = Counter()
        self._never: set[Any] = set()
        self._recorded: dict[Any, _Recorded] = {}
        self._waiting: weakref.ref[_Pass] | None = None  # a forward pass whose backward pass may come
        self._pool: Any = None
        self._decodings: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        if self.skips_logits and model.training and kwargs.get("labels") is not None:
            kwargs.setdefault("return_logits", False)
        is_part = torch.compiler.is_compiling() or _Recorded.running  # of a graph that someone else records
        key = None if is_part else self._key(model, args, kwargs)
        if key is None or not self._may_replay(key):
            result = model._call_impl(*args, **kwargs)
            if key is not None and not all(isinstance(x, (Tensor, *PLAIN)) for x in pytree.tree_leaves(result)):
                self._never.add(key)
            return result
        if key not in self._recorded:
            made = try_recording(
                lambda: _Recorded(model, args, kwargs, self._parameters, self._pool, self.lends),
                self._parameters[0].device,
                "altup.accelerate: a call is launched, because it could not be recorded",
            )
            if made is None:
                self._never.add(key)
                return model._call_impl(*args, **kwargs)
            self._recorded[key], self._pool = made, made.pool
        recorded = self._recorded[key]
        for other in self._recorded.values():
            other.keep_lent_gradients()  # all graphs share memory
        recorded.forward(args, kwargs)
        if not recorded.parameters:
            return recorded.answer([tensor.clone() for tensor in recorded.outputs])
        this = _Pass(recorded)
        self._waiting = weakref.ref(this)
        return recorded.answer(_Replayed.apply(this, *recorded.parameters))

    def _may_replay(self, key: Any) -> bool:
        """Whether the call may be replayed now, and was made often enough to be worth it."""
        waiting = self._waiting() if self._waiting is not None else None
        if key in self._never or (waiting is not None and not waiting.is_done):
            return False
        if key in self._recorded:
            return True
        trained = key[-1][0]
        if sum(kind[-1][0] == trained for kind in self._recorded) == (MOST_TRAINED if trained else MOST):
            return False
        if len(self._seen) == REMEMBERED:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] > LAUNCHED

    def decodings(self, model: nn.Module) -> dict[Any, Any]:
        """A place for what a model has recorded to decode; empty once weights have moved."""
        self._look_at_weights(model)
        return self._decodings

    def _look_at_weights(self, model: nn.Module) -> None:
        """Forget all graphs where weights lie elsewhere."""
        if not self._parts or any(_members(module) != members for module, members in self._parts):
            self._parts = [(module, _members(module)) for module in model.modules()]
            self._parameters = list(model.parameters())
        weights: list[Any] = [(p.data_ptr(), p.requires_grad) for p in self._parameters]
        if weights != self._weights:
            self._recorded.clear()
            self._decodings.clear()
            self._pool, self._weights = None, weights

    def obstacle(self, model: nn.Module) -> str | None:
        """Why no call of the model is recorded, whatever it is given, if so."""
        self._look_at_weights(model)
        device = self._parameters[0].device
        if any(p.device != device or isinstance(p, DTensor) for p in self._parameters):
            return "weights are sharded, or lie on several devices"
        if any(_is_hooked(module) for module, _ in self._parts):
            return "a module has hooks"
        if any(_recomputes(module) for module, _ in self._parts):
            return "layers are recomputed (gradient checkpointing)"
        return None

    def _key(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """The kind of a call; None where it cannot be recorded."""
        if (torch.is_grad_enabled() and not self.with_gradients) or self.obstacle(model):
            return None
        device = self._parameters[0].device
        kind = device.type
        if kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        described: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device == device and not leaf.requires_grad:
                described.append((leaf.shape, leaf.dtype))
            elif isinstance(leaf, PLAIN):
                described.append((type(leaf), leaf))
            else:
                return None
        modes = tuple(module.training for module, _ in self._parts)
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return str(structure), tuple(described), modes, autocast, grad


def _members(module: nn.Module) -> list[int]:
    return [*map(id, module._modules.values()), *map(id, module._parameters.values())]


def _is_hooked(module: nn.Module) -> bool:
    """Whether someone waits for each call of a part: a replayed graph calls none."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, hooks))


def _recomputes(module: nn.Module) -> bool:
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[dict[Tensor, nn.Parameter]]:
    """In place of a model's parameters others that share their memory, where gradients are wanted.

    The node of autograd that collects a parameter's gradient remembers the stream on which it was made. As long as
    the caller holds a loss it is that of an ordinary call, which must not wait for a stream that is recorded.
    """
    found: dict[Tensor, nn.Parameter] = {}
    places = []
    for module in model.modules() if torch.is_grad_enabled() else ():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.append((module, name, parameter))
                if parameter not in found:
                    found[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    try:
        for module, name, parameter in places:
            module._parameters[name] = found[parameter]
        yield found
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


class _Recorded:
    """One kind of call: `forward` fills `outputs`, `backward` turns `upstream` into `gradients`.

    `parameters` are those that get gradients: none where no gradients are wanted.
    """

    running = False  # whether a forward pass is recorded, or made again on a CPU, in this process

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        parameters: Sequence[nn.Parameter],
        pool: Any,
        lends: bool = False,
    ) -> None:
        self.lends = lends
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._model = weakref.ref(model)
        self.pool = pool
        self.parameters: list[nn.Parameter] = []
        self.outputs: list[Tensor] = []
        self.upstream: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._way_back: list[Tensor] = []  # the outputs that autograd knows
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        device = parameters[0].device
        if device.type != "cuda":
            self._try(parameters)
            return
        random = torch.cuda.get_rng_state(device)  # which the runs below use up
        warm_up(lambda: self._try(parameters), device)
        self._way_back, self.outputs, self.gradients = [], [], ()
        torch.clear_autocast_cache()  # a graph makes its own copies of weights, and leaves none behind
        self._graphs.append(record(self._run_forward, pool).graph)
        self.pool = self._graphs[0].pool()
        self._make_places(parameters)
        if self.parameters:
            self._graphs.append(record(self._run_backward, self.pool).graph)
        self._way_back, self._stand_ins = [], {}
        torch.clear_autocast_cache()
        torch.cuda.set_rng_state(random, device)

    def _try(self, parameters: Sequence[nn.Parameter]) -> None:
        torch.clear_autocast_cache()  # what another backward pass has gone through is not gone through again
        self._run_forward()
        self._make_places(parameters)
        if self.parameters:
            self._run_backward()

    def _make_places(self, parameters: Sequence[nn.Parameter]) -> None:
        self.differentiable = [i for i, tensor in enumerate(self._way_back) if tensor.requires_grad]
        self.upstream = [torch.zeros_like(self.outputs[i]) for i in self.differentiable]
        self.parameters = [p for p in parameters if p.requires_grad and self.differentiable]

    def _run_forward(self) -> None:
        model: Any = self._model()
        args, kwargs = pytree.tree_unflatten(self._leaves, self._structure)
        _Recorded.running = True
        try:
            with stand_ins(model) as self._stand_ins:
                answer = model._call_impl(*args, **kwargs)
        finally:
            _Recorded.running = False
        leaves, self._answer = pytree.tree_flatten(answer)
        self._kinds = [(True, None) if isinstance(leaf, Tensor) else (False, leaf) for leaf in leaves]
        self._way_back = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs = [tensor.detach() for tensor in self._way_back]

    def _run_backward(self) -> None:
        ends = [self._way_back[i] for i in self.differentiable]
        starts = [self._stand_ins[p] for p in self.parameters]
        gradients = torch.autograd.grad(ends, starts, self.upstream, allow_unused=True)
        if not self.gradients:
            self.gradients = gradients
            return
        for place, gradient in zip(self.gradients, gradients, strict=True):  # where a graph would write
            if place is not None:
                place.copy_(gradient)

    def forward(self, args: Any, kwargs: Any) -> None:
        for place, leaf in zip(self._leaves, pytree.tree_leaves((args, kwargs)), strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        if self._graphs:
            self._graphs[0].replay()
        else:
            self._run_forward()

    def backward(self, upstream: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of `parameters`, in places of their own, as the caller adds to them, unless they are lent."""
        for place, i in zip(self.upstream, self.differentiable, strict=True):
            gradient = upstream[i]
            if gradient is not None:
                place.copy_(gradient)
            else:
                place.zero_()
        if self._graphs:
            self._graphs[1].replay()
        else:
            self._run_backward()
        if self.lends:
            return _aliases(self.gradients)
        fresh = [None if gradient is None else torch.empty_like(gradient) for gradient in self.gradients]
        torch._foreach_copy_([t for t in fresh if t is not None], [g for g in self.gradients if g is not None])
        return fresh

    def keep_lent_gradients(self) -> None:
        """Copy what is still the `grad` of a parameter, as accumulation has it: the next pass writes there."""
        if self.lends:
            for parameter, lent in zip(self.parameters, self.gradients, strict=True):
                grad = parameter.grad
                if grad is not None and lent is not None and grad.data_ptr() == lent.data_ptr():
                    parameter.grad = grad.clone()

    def answer(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns, with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else constant for is_tensor, constant in self._kinds]
        return pytree.tree_unflatten(leaves, self._answer)


def _aliases(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors over the same memory that nobody else holds: autograd takes them as they are for a parameter's
    `grad`. Where two gradients are one, the second is a copy, as both may be scaled in place."""
    made: list[Tensor | None] = []
    given: set[int] = set()
    for gradient in gradients:
        if gradient is None:
            made.append(None)
            continue
        place = gradient.untyped_storage().data_ptr()
        made.append(gradient.clone() if place in given else gradient.detach())
        given.add(place)
    return made


class _Pass:
    """A forward pass that was replayed; once nobody holds its results, no backward pass will come."""

    def __init__(self, recorded: _Recorded) -> None:
        self.recorded, self.is_done = recorded, False

    def backward(self, upstream: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.is_done:
            raise RuntimeError(
                "a second backward pass through a call that was replayed as a CUDA graph, whose activations are "
                "gone; call altup.accelerate(model, record=False) to keep them (retain_graph=True)"
            )
        self.is_done = True
        return self.recorded.backward(upstream)


class _Replayed(torch.autograd.Function):
    """Joins a replayed call to autograd: (pass, parameters) → copies of the outputs."""

    @staticmethod
    def forward(ctx: Any, this: _Pass, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.this = this
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.clone() for tensor in this.recorded.outputs)
        known = set(this.recorded.differentiable)
        ctx.mark_non_differentiable(*(tensor for i, tensor in enumerate(outputs) if i not in known))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.this.backward(gradients))
