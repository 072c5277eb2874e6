"""What `widen_types.py` asks of a model before and after it is widened."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny_inputs import inputs_of, redrawn
from torch import Tensor
from transformers import PreTrainedModel

import altup
from altup.core.errors import UserError
from altup.models.widening.parameters import WideningPlan


class DifferentError(Exception):
    """A widened model that does not do what the original does."""


def outputs(model: PreTrainedModel, given: dict[str, Any], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(numbers(model(**given, **options)))


def numbers(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)


def compare(what: str, before: list[Tensor], after: list[Tensor], limit: float = 1e-3) -> None:
    """Outputs that are wider are compared in their first block."""
    if len(before) != len(after):
        raise DifferentError(f"{what}: {len(after)} tensors for {len(before)}")
    for i, (theirs, ours) in enumerate(zip(before, after, strict=True)):
        ours = ours[..., : theirs.shape[-1]] if theirs.dim() else ours
        if ours.shape != theirs.shape:
            raise DifferentError(f"{what}: tensor {i} is {list(ours.shape)} for {list(theirs.shape)}")
        finite = theirs.isfinite() & (theirs.abs() < 1e30)  # masks are as large as can be
        error = (ours[finite].double() - theirs[finite].double()).norm()
        error /= theirs[finite].double().norm() + 1e-3 * max(1, theirs.numel()) ** 0.5
        if not error <= limit:
            raise DifferentError(f"{what}: tensor {i} has a relative error of {error:.1e}")


def gradients(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Tensor]:
    """Of the mean of x² + x³ over the outputs, which is no constant where they are normalized; with no dropout."""
    model.zero_grad()
    torch.manual_seed(0)
    found = [value for value in numbers(model(**given)) if value.requires_grad]
    finite = [value[value.abs() < 1e30] for value in found[:1]]
    sum((value.square() + value.pow(3)).mean() for value in finite).backward()  # type: ignore[union-attr]
    made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return made


class Sweep:
    """All that is asked of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.example = inputs_of(model, 0)
        self.inputs = redrawn(self.example, 1)
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}

    def run(self, method: str) -> None:
        """Raise what is wrong."""
        self.asked = []
        richest = "all" if "all" in self.example else list(self.example)[-1]
        self.without_an_example(method)
        wide = altup.widen(copy.deepcopy(self.model), method, 2, example=self.example[richest])
        self.ask("function", self.same_function, wide)
        self.ask("hidden states", self.same_hidden_states, wide)
        self.ask("gradients", self.same_gradients, wide)
        self.ask("text", self.same_text, wide)
        self.ask("disk", self.same_from_disk, wide)
        self.ask("narrow", self.narrow, wide)

    def without_an_example(self, method: str) -> None:
        if method == "altup" and any("inputs_embeds" in given for given in self.inputs.values()):
            return  # whose width is that of the tables, and wide now
        try:
            wide = altup.widen(copy.deepcopy(self.model), method, 2)
        except UserError:
            return
        self.ask("without an example", self.same_function, wide)

    def ask(self, what: str, question: Callable[..., None], wide: PreTrainedModel) -> None:
        try:
            question(wide)
        except NotImplementedError:
            return
        except Exception as error:
            error.add_note(what)
            raise
        self.asked.append(what)

    def original(self, question: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the original does, found once; what it cannot do is not asked."""
        if question not in self.answers:
            try:
                self.answers[question] = function(self.model, *args, **options)
            except Exception as error:
                self.answers[question] = error
        if isinstance(self.answers[question], Exception):
            raise NotImplementedError
        return self.answers[question]

    def same_function(self, wide: PreTrainedModel) -> None:
        for name, given in self.inputs.items():
            before = self.original(f"outputs for {name}", outputs, given)
            compare(f"outputs for {name}", before, outputs(wide, given))

    def same_hidden_states(self, wide: PreTrainedModel) -> None:
        for name, given in self.inputs.items():
            before = self.original(f"states for {name}", outputs, given, output_hidden_states=True)
            compare(f"hidden states for {name}", before, outputs(wide, given, output_hidden_states=True))

    def same_gradients(self, wide: PreTrainedModel) -> None:
        """Those of the layers: blocks that start equal move together."""
        given = list(self.inputs.values())[-1]
        before = self.original("gradients", gradients, given)
        if not all(value.isfinite().all() for value in before.values()):
            raise NotImplementedError
        after = gradients(wide, given)
        plan = WideningPlan.of(wide)
        stacks = tuple(f"{name}." for name in plan.stacks) if plan else ()
        largest = max((float(value.norm()) for value in before.values()), default=0.0)
        for name, theirs in before.items():
            if name.startswith(stacks) and name not in {**plan.repeated, **plan.shared}:  # type: ignore[union-attr]
                if name not in after:
                    raise DifferentError(f"{name} has no gradient")
                error = float((after[name] - theirs).norm())
                if not error <= 1e-3 * float(theirs.norm()) + 1e-4 * largest:
                    raise DifferentError(f"gradient of {name}: an error of {error:.1e} of {theirs.norm():.1e}")
        reached = [name for name in before if name.startswith(stacks)]
        moved = [name for name, value in after.items() if ".altup." in name and value.isfinite().all()]
        if reached and not moved:
            raise DifferentError("no coefficient has a gradient")

    def same_text(self, wide: PreTrainedModel) -> None:
        if not self.model.can_generate():
            raise NotImplementedError
        for modality, given in self.inputs.items():
            given = {name: value for name, value in given.items() if name != "decoder_input_ids"}
            before = self.original(f"text for {modality}", written, given)
            if not torch.equal(written(wide, given), before):
                raise DifferentError("another text is written")

    def same_from_disk(self, wide: PreTrainedModel) -> None:
        given = list(self.inputs.values())[-1]
        try:
            loaded = from_disk(wide, lambda folder: altup.load_widened(folder, type(wide)))
            compare("outputs from disk", outputs(wide, given), outputs(loaded, given), 1e-6)
        except Exception:
            loaded = self.original("disk", from_disk, type(self.model).from_pretrained)
            before = list(self.original("outputs for " + list(self.inputs)[-1], outputs, given))
            try:
                compare("the original from disk", before, outputs(loaded, given), 1e-6)
            except Exception:
                raise NotImplementedError from None
            raise

    def narrow(self, wide: PreTrainedModel) -> None:
        altup.narrow(wide)
        before, after = self.model.state_dict(), wide.state_dict()
        lost = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
        if lost or before.keys() != after.keys():
            raise DifferentError(f"narrow again, {[*lost, *(after.keys() - before.keys())][0]} is another")
        given = list(self.inputs.values())[-1]
        compare("outputs when narrow again", outputs(self.model, given), outputs(wide, given), 1e-6)


def written(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    text = model.generate(**own, max_new_tokens=4, do_sample=False)  # BLIP writes into what it is given
    if not isinstance(text, Tensor):
        raise NotImplementedError("it returns no text")
    return text


def from_disk(model: PreTrainedModel, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder).eval()
