"""Gemma 3n: AltUp of one layer, a whole training step, and decoding; Hugging Face's code and ours on it.

Random weights in the shapes of E2B and E4B, text alone. Peers run with SDPA and, compiled, with FlexAttention;
compiled layer by layer with their loss, and whole. A provider is checked before it is timed: on a model of the
same widths and four layers, whose float64 twin fits into memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from altup.bench.cases.floors import copy_work
from altup.bench.cases.step import held_bytes, share_weights
from altup.bench.problem import Problem, Provider, Setup, Work, distance, errors
from altup.models.accelerate import accelerate
from altup.models.recorded_calls import LAUNCHED, RecordedCalls
from altup.models.stack import compile_layers

Prepare = Callable[[Any], Any]  # a model of Hugging Face → what is called in its place
SHAPES = {"E2B": {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}, "E4B": {}}
QUICK = {
    "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size_per_layer_input": 4, "laurel_rank": 4,
    "sliding_window": 8,
}  # fmt: skip
SHALLOW = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}
TUNED = {"all": "full fine-tuning", "lora": "lora"}
BATCHES = ((1, 4, 2048), (16, 1, 8192))  # texts that are decoded; rows and tokens of a step
RANK = 16  # of the adapters
FLEX: dict[str, Any] = {}  # kernel options of FlexAttention; empty: those that PyTorch takes by itself
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# bf16 rounds every activation: gradients of Hugging Face's own code are off by hundredths too.
TOLERANCES = {"loss": 2e-2, "gradient": 0.1, "": 5e-2}
TOLERANCES_FLOAT32 = {"": 1e-3}
REGRET = 0.2  # standard deviations of the logits: rounding decides ties


def problems(setup: Setup) -> Iterator[Problem]:
    """What most people run first: the sizes of a run that is ended early."""
    yield module_problem(setup)
    for size in ("tiny",) if setup.quick else SHAPES:
        models = Models(setup, size)
        for texts, rows, length in ((2, 2, 12),) if setup.quick else BATCHES:
            yield models.decoding(texts, 8 if setup.quick else 128, 4 if setup.quick else 64)
            for tuned in TUNED:
                yield models.step(rows, length, tuned)


def providers(
    build: Callable[[Prepare], Work], compiled: dict[str, tuple[Prepare, Prepare | None]]
) -> list[Provider]:
    """Hugging Face's code as it is, ours in plain PyTorch and on the kernels, and each compiled: by name, how
    theirs is and how ours."""
    made = [
        Provider("hf eager", partial(build, as_it_is), "peer"),
        Provider("altup plain", partial(build, partial(accelerate, implementation="plain")), "plain"),
        Provider("altup", partial(build, kernels), triton=True),
    ]
    for name, (theirs, ours) in compiled.items():
        made.append(Provider(f"hf {name}", partial(build, theirs), "peer", compiled=True))
        if ours is not None:
            both = partial(in_turn, kernels, ours)
            made.append(Provider(f"altup {name}", partial(build, both), compiled=True, triton=True))
    return made


def kernels(model: Any, remake: bool = False, record: bool | None = None) -> Any:
    return accelerate(model, implementation="triton", remake=remake, record=record)


def as_it_is(model: Any) -> Any:
    return model


def in_turn(first: Prepare, second: Prepare, model: Any) -> Any:
    return second(first(model))


def compiled_whole(model: Any) -> Any:
    return torch.compile(model, dynamic=False)


def compiled_layers(model: Any, **options: Any) -> Any:
    """Layer by layer, and the head with its loss: one graph, which ends where the layers' model is called."""
    compile_layers(model, **options)
    model.model.forward = torch.compiler.disable(model.model.forward)
    model.compile(dynamic=False, **options)
    return model


def flexible(model: Any, **options: Any) -> Any:
    """With FlexAttention, which skips what lies outside of a window."""
    compiled_layers(model, **options)
    return with_flex(model)


def with_flex(model: Any) -> Callable[..., Any]:
    """How a model is called with FlexAttention: its masks are made once a shape, not in every step."""
    model.set_attn_implementation("flex_attention")
    masks = cache(partial(block_masks, model))

    def run(input_ids: Tensor, labels: Tensor) -> Any:
        return model(
            input_ids=input_ids,
            labels=labels,
            attention_mask=masks(input_ids.shape),
            kernel_options=dict(FLEX) or None,
        )

    return run


def block_masks(model: Any, shape: torch.Size) -> dict[str, Any]:
    """As the model makes them itself of tokens alone, by kind of attention."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    given = {
        "config": model.config,
        "inputs_embeds": torch.empty(*shape, 1, device=model.device),
        "attention_mask": None,
        "past_key_values": None,
    }
    with torch.compiler.set_stance("force_eager"):  # once: not worth compiling
        return {
            "full_attention": create_causal_mask(**given),
            "sliding_attention": create_sliding_window_causal_mask(**given),
        }


def is_recorded(model: Any) -> bool:
    return isinstance(model._compiled_call_impl, RecordedCalls)


def tolerances(setup: Setup) -> dict[str, float]:
    return TOLERANCES if setup.dtype == torch.bfloat16 else TOLERANCES_FLOAT32


def module_problem(setup: Setup) -> Problem:
    """`predict` and `correct` of one layer, as Hugging Face's module has them."""
    tokens, d = ((2, 8), 16) if setup.quick else ((16, 2048), 2048)
    inputs = ModuleInputs(setup, tokens, d)
    return Problem(
        "gemma3n",
        {"method": "one layer's altup", "tokens": tokens[0] * tokens[1], "d": d, "k": 4},
        [
            *providers(inputs.work, {"compiled": (compiled_whole, compiled_whole)}),
            Provider("copy", partial(copy_work, setup.device, setup.quick), "floor"),
        ],
        tolerances=tolerances(setup),
    )


class Layer(nn.Module):
    """One layer's AltUp without the layer."""

    def __init__(self, altup: nn.Module) -> None:
        super().__init__()
        self.altup = altup

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        altup: Any = self.altup
        return altup.correct(altup.predict(x), y)


class ModuleInputs:
    def __init__(self, setup: Setup, tokens: tuple[int, int], d: int) -> None:
        from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

        torch.manual_seed(0)
        with setup.device:
            altup: Any = Gemma3nTextAltUp(text_config(hidden_size=d, num_attention_heads=1))
            self.x = torch.randn(4, *tokens, d).to(setup.dtype).requires_grad_()
            self.y = torch.randn(*tokens, d).to(setup.dtype).requires_grad_()
            self.upstream = torch.randn(4, *tokens, d).to(setup.dtype)
        del altup.correct_output_scale  # used behind the correction
        nn.init.normal_(altup.modality_router.weight, std=d**0.5)
        self.layer = Layer(altup.to(setup.dtype).eval())
        self.reference = cache(self._reference)

    def work(self, prepare: Prepare) -> Work:
        layer = share_weights(self.layer)
        layer.altup.register_parameter("correct_output_scale", None)
        run = prepare(layer)
        inputs = [self.x, self.y, *self.layer.parameters()]

        def backward(out: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, inputs, self.upstream)

        def compare() -> dict[str, float]:
            out = run(self.x, self.y)
            return errors({"new state": out, "gradients": backward(out)}, self.reference())

        return Work(lambda i: run(self.x, self.y), backward, compare)

    def _reference(self) -> dict[str, Any]:
        layer = copy.deepcopy(self.layer).double()
        x, y = (t.detach().double().requires_grad_() for t in (self.x, self.y))
        out = layer(x, y)
        return {
            "new state": out.detach(),
            "gradients": torch.autograd.grad(out, [x, y, *layer.parameters()], self.upstream.double()),
        }


def text_config(**fields: Any) -> Any:
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(**fields)


class Models:
    """One size's model, and the shallow one that checks run on; all providers share their weights."""

    def __init__(self, setup: Setup, size: str) -> None:
        self.setup, self.size = setup, size
        self.fields: dict[str, Any] = {**QUICK, **SHALLOW} if setup.quick else SHAPES[size]
        self.whole = cache(partial(self._build, {}))
        self.shallow = cache(partial(self._build, SHALLOW))
        self.reference = cache(self._reference)

    def _build(self, more: dict[str, Any]) -> Any:
        from transformers import Gemma3nForCausalLM

        torch.manual_seed(1)
        config = text_config(**{**self.fields, **more}, use_cache=False)
        with self.setup.device:
            model: Any = Gemma3nForCausalLM._from_config(config, dtype=self.setup.dtype)
        for name, parameter in model.named_parameters():
            if "modality_router" in name or "correct_output_scale" in name:
                nn.init.normal_(parameter, std=1.0)  # fresh ones are almost or exactly zero
        return model

    def step(self, rows: int, length: int, tuned: str) -> Problem:
        """Forward and backward with labels; no optimizer."""
        build = partial(self._step, rows, length, tuned)
        return Problem(
            "gemma3n",
            {"size": self.size, "method": TUNED[tuned], "batch": rows, "inputs": length},
            [
                *providers(
                    build,
                    {
                        "layers compiled": (compiled_layers, compile_layers),
                        "flex layers compiled": (flexible, None),
                        "compiled": (compiled_whole, compiled_whole),
                    },
                ),
                Provider("altup remake", partial(build, partial(kernels, remake=True)), triton=True),
                Provider("altup recorded", partial(build, partial(kernels, record=True)), triton=True),
                Provider(
                    "altup recorded remake",
                    partial(build, partial(kernels, remake=True, record=True)),
                    triton=True,
                ),
            ],
            tolerances=tolerances(self.setup),
        )

    def _step(self, rows: int, length: int, tuned: str, prepare: Prepare) -> Work:
        model = adapted(self.whole(), tuned).train()
        run, ids = prepare(model), self._ids(rows, length)

        def backward(loss: Tensor) -> None:
            loss.backward()
            model.zero_grad(set_to_none=True)

        return Work(
            lambda i: run(input_ids=ids, labels=ids).loss,
            backward,
            partial(self._step_errors, tuned, prepare),
            per_repetition=rows * length,
            unit="tokens/s",
            held=held_bytes(model),
            records=is_recorded(model),
        )

    def _step_errors(self, tuned: str, prepare: Prepare) -> dict[str, float]:
        model = adapted(self.shallow(), tuned).train()
        run = prepare(model)
        for _ in range(LAUNCHED + 1 if is_recorded(model) else 1):
            model.zero_grad(set_to_none=True)
            loss = run(**self._example()).loss
            loss.backward()
        want_loss, want = self.reference(tuned)
        got = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        model.zero_grad(set_to_none=True)
        if missing := [name for name in want if got[name] is None]:
            return {f"gradient of {missing[0]}": float("inf")}
        return {
            "loss": distance(loss, want_loss),
            "gradient": distance([got[name] for name in want], list(want.values())),
        }

    def _reference(self, tuned: str) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(adapted(self.shallow(), tuned)).double().train()
        loss = model(**self._example()).loss
        loss.backward()
        found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), found

    def _example(self) -> dict[str, Tensor]:
        ids = self._ids(1, 12 if self.setup.quick else 1024)  # more than a window
        return {"input_ids": ids, "labels": ids}

    def _ids(self, rows: int, length: int) -> Tensor:
        torch.manual_seed(2)
        vocabulary = self.fields.get("vocab_size", 262_144)
        return torch.randint(3, vocabulary, (rows, length), device=self.setup.device)

    def decoding(self, rows: int, prompt: int, new_tokens: int) -> Problem:
        """Greedy, through `generate`: as most people call it, which ours records, and with a cache of fixed size,
        with which transformers compiles the model."""
        build = partial(self._decoding, rows, prompt, new_tokens)
        fixed = {"cache_implementation": "static"}
        return Problem(
            "gemma3n",
            {"size": self.size, "method": "decoding", "batch": rows, "inputs": prompt, "targets": new_tokens},
            [
                Provider("hf", partial(build, as_it_is, {}), "peer"),
                Provider("hf static", partial(build, as_it_is, fixed), "peer", compiled=True),
                Provider("altup plain", partial(build, partial(accelerate, implementation="plain"), {}), "plain"),
                Provider("altup", partial(build, kernels, {}), triton=True),
                Provider("altup static", partial(build, kernels, fixed), compiled=True, triton=True),
            ],
            tolerances={"": REGRET},
        )

    def _decoding(
        self, rows: int, prompt: int, new_tokens: int, prepare: Prepare, options: dict[str, Any]
    ) -> Work:
        @torch.inference_mode()
        def generate(model: Any, ids: Tensor) -> Tensor:
            return model.generate(
                input_ids=ids,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                use_cache=True,
                **options,
            )

        model, ids = prepare(share_weights(self.whole()).eval()), self._ids(rows, prompt)
        return Work(
            lambda i: generate(model, ids),
            errors=lambda: {"least likely token": self._regret(prepare, generate, ids)},
            mode="generate",
            per_repetition=rows * new_tokens,
            unit="tokens/s",
            held=held_bytes(model),
            on_host=True,
        )

    @torch.no_grad()
    def _regret(self, prepare: Prepare, generate: Callable[[Any, Tensor], Tensor], ids: Tensor) -> float:
        """How far the logit of a chosen token lies below the highest, in standard deviations, by float64."""
        tokens = generate(prepare(share_weights(self.shallow()).eval()), ids)
        logits = copy.deepcopy(self.shallow()).double().eval()(input_ids=tokens[:, :-1]).logits
        logits = logits[:, ids.shape[1] - 1 :]
        chosen = logits.gather(-1, tokens[:, ids.shape[1] :, None]).squeeze(-1)
        return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


class Adapter(nn.Module):
    """A frozen linear map with a trained one of low rank beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        generator = torch.Generator(linear.weight.device).manual_seed(3)
        self.linear = linear
        self.down = nn.Parameter(torch.empty(RANK, linear.in_features, **like))
        self.up = nn.Parameter(torch.empty(linear.out_features, RANK, **like))
        for matrix in (self.down, self.up):  # an adapter that has been trained a little
            nn.init.normal_(matrix, std=0.1 * matrix.shape[1] ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.down.t()) @ self.up.t()


def adapted(model: Any, tuned: str) -> Any:
    """A model over the same weights: all of them trained, or adapters alone."""
    model = share_weights(model)
    model.requires_grad_(tuned == "all")
    if tuned == "lora":
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in ADAPTED:
                    setattr(module, name, Adapter(child))
    return model
