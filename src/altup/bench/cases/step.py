"""Forward and backward of a whole T5 1.1: our methods, Hugging Face's T5, and what bounds them from below.

bf16 weights (float32 on a CPU), dropout 0, no padding, no optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from altup.bench.cases.floors import copy_bytes, copy_work, extra_shapes, product_shapes, product_work
from altup.bench.problem import Fact, Problem, Provider, Setup, Timings, Work, distance
from altup.kernels.fp8 import CAPABILITY
from altup.models import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.models.accounting import INPUTS, TARGETS, list_layers
from altup.models.stack import compile_layers
from altup.models.t5.convert import hugging_face_name, to_hugging_face
from altup.nn import coefficient_names
from altup.nn.linear import use_fp8
from altup.training.graphs import Graphs

Run = Callable[..., Any]  # a model's inputs → its output, which has a loss
BATCH = {"small": 64, "base": 64, "large": 32, "xl": 8}
QUICK = {"num_layers": 3, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2, "vocab_size": 96}
METHODS = {
    "dense": ("dense", None),
    "altup k2": ("altup", 2),
    "altup k4": ("altup", 4),
    "recycled k2": ("recycled", 2),
    "sequence-altup": ("sequence-altup", None),
    "stride-and-skip": ("stride-and-skip", None),
}
WIDENED = ("altup k2", "altup k4", "recycled k2")  # methods with a wide state
WIDE_OUTPUT = ("altup k2", "altup k4")  # of these, those whose head and cross-attention read it whole
FEW = ("dense", "altup k2", "recycled k2")  # of the sizes above base
EAGER = ("dense", "altup k2")  # also timed without the compiler
IN_FP8 = ("dense", "altup k2", "recycled k2", "sequence-altup")  # also timed with the layers' products in fp8
DROPOUT = 0.1
BY_SEQUENCE = {"dropout": False, "dropout by sequence": True}  # whether all tokens of a sequence lose the same
FP8 = " fp8"  # behind the name of such a provider
PRODUCTS = "products of dense"
# The reference works on this many sequences at a time: float64 takes four times the room of bf16.
REFERENCE_ROWS = 4
# bf16 rounds every activation of 24 to 48 layers, which shows as 0.02 to 0.04; a wrong kernel is off by far more.
# Gradients of few numbers are sums over all tokens of terms that cancel. Hugging Face's loss itself is bf16.
# fp8 rounds the factors of every product, gradients to 2 bits, which shows as 0.2 to 0.3.
TOLERANCES = {
    "loss": 2e-2, "gradient": 0.1, "coefficients": 0.2, "relative bias": 0.2,
    "fp8 loss": 5e-2, "fp8 gradient": 0.5, "fp8 coefficients": 1.0, "fp8 relative bias": 1.0,
}  # fmt: skip
TOLERANCES_FLOAT32 = {"": 1e-3}


def tolerances(setup: Setup) -> dict[str, float]:
    return TOLERANCES if setup.dtype == torch.bfloat16 else TOLERANCES_FLOAT32


def problems(setup: Setup) -> Iterator[Problem]:
    for size in ("tiny",) if setup.quick else setup.sizes:
        yield problem(setup, Models(setup, size))


def problem(setup: Setup, models: Models) -> Problem:
    batch = models.batch
    few = models.size in ("large", "xl")
    providers = []
    if not few:
        providers += [
            Provider(f"hf {kind}", partial(models.hugging_face, kind), "peer") for kind in ("eager", "sdpa")
        ]
    providers += [
        Provider(f"hf {kind} compiled", partial(models.hugging_face, kind, compiled=True), "peer", compiled=True)
        for kind in ("eager", "sdpa")
    ]
    methods = FEW if few else tuple(METHODS)
    for name in methods:
        if name in EAGER or not setup.compiles:
            providers.append(Provider(f"{name} eager", partial(models.ours, name, compiled=False)))
        providers.append(Provider(name, partial(models.ours, name), compiled=True))
        if name in IN_FP8 and multiplies_fp8(setup.device):
            providers.append(Provider(name + FP8, partial(models.ours, name, fp8=True), compiled=True))
    if not few:
        for how, per_sequence in BY_SEQUENCE.items():
            build = partial(models.ours, "dense", dropout=DROPOUT, per_sequence=per_sequence)
            providers.append(Provider(f"dense {how}", build, compiled=True))
    providers.append(Provider("copy", partial(copy_work, setup.device, setup.quick), "floor"))
    providers.append(Provider(PRODUCTS, models.products, "floor"))
    for name in methods:
        if name in WIDE_OUTPUT:
            providers.append(Provider(extra_products(name), partial(models.extra_products, name), "floor"))
    return Problem(
        "step",
        {"size": models.size, "batch": batch.rows, "inputs": batch.inputs, "targets": batch.targets},
        providers,
        tolerances=tolerances(setup),
        derive=partial(compare_methods, models=models),
    )


def compare_methods(timings: Timings, models: Models) -> Iterable[Fact]:
    """Overheads over our own dense model, and what share of a step its matrix products are.

    The floor of a widened model's overhead is its extra matrix products alone, and (5K + 3) blocks of the state
    for each layer at the speed of a copy. At toy sizes, where starting an operation takes longer than doing it,
    floors mean nothing, and are skipped.
    """
    whole = {name: modes["both"].p50 for name, modes in timings.items() if "both" in modes}
    copied = timings["copy"]["copy"].p50 if "copy" in timings else None
    for provider in whole:
        name = provider.removesuffix(" eager").removesuffix(FP8)
        if name not in METHODS:
            continue
        if provider.endswith(FP8):
            yield from compare_fp8(provider, name, whole)
            continue
        dense, products = whole.get(provider.replace(name, "dense")), whole.get(PRODUCTS)
        extra = whole.get(extra_products(name)) if name in WIDE_OUTPUT else 0.0
        if models.setup.quick:
            products = extra = None
        if (name == "dense" or name in WIDENED) and products is not None and extra is not None:
            share = (products + extra) / whole[provider]
            yield Fact(provider, "fraction", share, "matrix products alone over the step")
        if dense is None or name == "dense":
            continue
        yield Fact(provider, "overhead", whole[provider] / dense - 1, "over our dense")
        if name in WIDENED and copied is not None and extra is not None:
            floor = extra + models.rule_bytes(name) * copied / copy_bytes(models.setup.quick)
            yield Fact(
                provider, "floor", floor / dense, "extra products and (5K + 3) blocks a layer at copy speed"
            )
            yield Fact(provider, "overhead/floor", (whole[provider] - dense) / floor, "overhead over its floor")


def compare_fp8(provider: str, name: str, whole: dict[str, float]) -> Iterable[Fact]:
    """How much faster than in bf16 it is; and the overhead over our dense model in fp8."""
    if name in whole:
        yield Fact(provider, "over bf16", whole[name] / whole[provider], f"speedup over {name} in bf16")
    if name != "dense" and "dense" + FP8 in whole:
        yield Fact(provider, "overhead", whole[provider] / whole["dense" + FP8] - 1, "over our dense in fp8")


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def extra_products(name: str) -> str:
    return f"extra products of {name}"


@dataclass(frozen=True)
class Batch:
    """Random tokens without padding."""

    input_ids: Tensor
    labels: Tensor

    @classmethod
    def random(cls, setup: Setup, rows: int, inputs: int, targets: int, vocabulary: int) -> Batch:
        torch.manual_seed(0)
        return cls(*(torch.randint(3, vocabulary, (rows, n), device=setup.device) for n in (inputs, targets)))

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def inputs(self) -> int:
        return self.input_ids.shape[1]

    @property
    def targets(self) -> int:
        return self.labels.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.inputs, self.targets

    def parts(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, self.rows, REFERENCE_ROWS):
            rows = slice(start, start + REFERENCE_ROWS)
            yield {"input_ids": self.input_ids[rows], "labels": self.labels[rows]}

    def whole(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "labels": self.labels}


class Models:
    """The models of one size; all ways to run one method share its weights."""

    def __init__(self, setup: Setup, size: str) -> None:
        self.setup, self.size = setup, size
        fields = QUICK if setup.quick else {}
        self.configs = {
            name: AltUpT5Config.from_preset(size, method, k, **fields) for name, (method, k) in METHODS.items()
        }
        shape = (2, 24, 8) if setup.quick else (BATCH[size], INPUTS, TARGETS)
        self.batch = Batch.random(setup, *shape, self.configs["dense"].vocab_size)
        self.master = cache(self._master)
        self.reference = lru_cache(maxsize=2)(self._reference)  # of the methods that run eagerly and compiled

    def ours(
        self, name: str, compiled: bool = True, fp8: bool = False, dropout: float = 0.0, per_sequence: bool = False
    ) -> Work:
        """As training runs it: eager, or with compiled layers as a graph. With dropout nothing is compared."""
        drops = {"dropout_rate": dropout, "sequence_dropout": per_sequence} if dropout else {}
        model = share_weights(self.master(name, **drops))
        if fp8:
            use_fp8(model)
        if compiled:
            compile_layers(model)
        run = partial(model, return_logits=False)
        if compiled and self.setup.device.type == "cuda":
            work = self._recorded(model, run, name, "fp8 " if fp8 else "")
        else:
            work = self._work(model, run, lambda parameter: parameter, name)
        return replace(work, errors=None) if dropout else work

    def _recorded(self, model: nn.Module, run: Run, name: str, mark: str) -> Work:
        """Forward and backward as a graph, whose parts cannot be told apart any more; `mark` stands before the
        names of errors, which have tolerances of their own in fp8."""
        one = torch.ones((), device=self.setup.device)

        def both(inputs: dict[str, Tensor], scale: Tensor) -> Tensor:
            loss = run(**inputs).loss
            (loss * scale).backward()
            return loss.detach()

        def unrecorded() -> None:
            both(self.batch.whole(), one)
            model.zero_grad(set_to_none=True)

        def errors() -> dict[str, float]:
            want_loss, want = self.reference(name)
            loss = graphs(self.batch.whole(), one)
            got = {n: p.grad for n, p in model.named_parameters() if n in want}
            coefficients = coefficient_names(model)
            found = {"loss": distance(loss, want_loss), **gradient_errors(got, want, coefficients)}
            return {mark + part: error for part, error in found.items()}

        graphs = Graphs(model, both)
        return Work(
            lambda i: graphs(self.batch.whole(), one),
            errors=errors,
            mode="both",
            per_repetition=self.batch.rows,
            held=held_bytes(model),
            unrecorded=unrecorded,
        )

    def hugging_face(self, attention: str, compiled: bool = False) -> Work:
        """Their T5 with our weights; its head is untied, as T5 1.1's is."""
        with self.setup.device:
            model = to_hugging_face(self.master("dense")).train()
        for part in (model, model.encoder, model.decoder):  # the stacks have configs of their own, which it misses
            part.set_attn_implementation(attention)
        run: Any = torch.compile(model, dynamic=False) if compiled else model
        return self._work(model, partial(run, use_cache=False), hugging_face_name, "dense")

    def products(self) -> Work:
        return product_work(product_shapes(self.configs["dense"], *self.batch.shape), self.setup)

    def extra_products(self, name: str) -> Work:
        return product_work(extra_shapes(self.configs[name], *self.batch.shape), self.setup)

    def rule_bytes(self, name: str) -> int:
        """(5K + 3) blocks of the state for every layer."""
        config = self.configs[name]
        tokens = sum(layer.state_tokens for layer in list_layers(config, self.batch.inputs, self.batch.targets))
        block = self.batch.rows * tokens * config.d_model * self.setup.dtype.itemsize
        return (5 * config.num_blocks + 3) * block

    def _master(self, name: str, **settings: Any) -> AltUpT5ForConditionalGeneration:
        """Weights as they start, but for the rules' coefficients, moved from their special values."""
        torch.manual_seed(1)
        with self.setup.device:
            model: Any = AltUpT5ForConditionalGeneration(
                AltUpT5Config.from_dict({**self.configs[name].to_dict(), **settings})
            )
        coefficients = coefficient_names(model)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name in coefficients:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        return model.to(self.setup.dtype).train()

    def _work(self, model: nn.Module, run: Run, their_name: Callable[[str], str], name: str) -> Work:
        def loss() -> Tensor:
            return run(**self.batch.whole()).loss

        def backward(out: Tensor) -> None:
            out.backward()
            model.zero_grad(set_to_none=True)

        def errors() -> dict[str, float]:
            want_loss, want = self.reference(name)
            out = loss()
            out.backward()
            parameters = dict(model.named_parameters())
            got = {ours: parameters[their_name(ours)].grad for ours in want}
            model.zero_grad(set_to_none=True)
            coefficients = coefficient_names(self.master(name))
            return {"loss": distance(out, want_loss), **gradient_errors(got, want, coefficients)}

        return Work(lambda i: loss(), backward, errors, per_repetition=self.batch.rows, held=held_bytes(model))

    def _reference(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss and gradients in float64, where nothing is fused; kept in float32."""
        model = copy.deepcopy(self.master(name)).double()
        total = torch.zeros((), dtype=torch.float64, device=self.setup.device)
        labels = self.batch.labels.numel()
        for part in self.batch.parts():
            loss = model(**part, return_logits=False).loss_sum / labels
            loss.backward()
            total += loss.detach()
        gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        return total, gradients


def held_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def share_weights(model: nn.Module) -> Any:
    """A model of its own over the same parameters, so that compiling one does not change the other."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def gradient_errors(got: dict[str, Any], want: dict[str, Tensor], coefficients: set[str]) -> dict[str, float]:
    """Of all gradients as one vector, and of two kinds that are too few to show in it."""
    if missing := [name for name in want if got[name] is None]:
        return {f"gradient of {missing[0]}": float("inf")}
    groups = {
        "gradient": list(want),
        "coefficients": [name for name in want if name in coefficients],
        "relative bias": [name for name in want if "relative_bias" in name],
    }
    return {
        group: distance([got[name] for name in names], [want[name] for name in names])
        for group, names in groups.items()
        if names
    }
