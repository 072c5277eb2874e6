"""Any Hugging Face transformer made K times as wide, starting as the function it was, and back again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace as replace_fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from altup.core.errors import UserError
from altup.models.config import AltUpConfig
from altup.models.widening.blocks import UnfitError, unwatch, watch_stack
from altup.models.widening.dropout import functional_dropouts, separate_masks, share_masks
from altup.models.widening.further import grow
from altup.models.widening.layer import (
    Place,
    first_argument,
    narrow_layer,
    widen_layer,
)
from altup.models.widening.parameters import (
    Layers,
    WideningPlan,
    forget_ties,
    names_of,
    repeat,
    replace,
    share,
    tie_again,
    unrepeat,
    unshare,
    untie,
    widen_parameter,
)
from altup.models.widening.probe import (
    as_generate_asks,
    configs_of,
    difference,
    refuse_not_finite,
    run,
    tolerance,
)
from altup.models.widening.structure import (
    Entries,
    find_entries,
    find_stacks,
    parts_not_run,
    structure_of,
    told,
    unrecognised,
    widening_readers,
)
from altup.models.widening.training import watch_for_decay


def widen(
    model: PreTrainedModel,
    method: str = "recycled",
    num_blocks: int = 2,
    selection: str | list[int] | None = None,
    *,
    k: int | None = None,
    example: dict[str, Any] | None = None,
    stacks: list[str] | None = None,
    layers: Layers | Mapping[str, Layers] | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Widen `model` in place and return it: until it is trained it computes what it did, up to rounding.

    - `recycled`: every stack's input is repeated K times and its output is the mean of the K blocks. Nothing but
      K² + K scalars a layer is added, and the model's inputs and outputs keep their shapes.
    - `altup`, `sameup`: tables, final norm and head are K times as wide as well, and so is what a stack returns.
      A head that was tied to the table gets weights of its own.

    `selection` says which block each layer works on: `alternating`, `same`, or a list with one block a layer.
    `layers` says where a `recycled` state is wide: it is repeated before the first of these layers and averaged
    after the last; the others stay as they are.
    The model is run before and after with `example`, a small batch that is made up when not given.
    A model that is widened already, trained or not, grows to a multiple of its blocks.

    Args:
        model: Any transformer of Hugging Face: causal, masked, sequence-to-sequence, vision or speech.
        method: `recycled`, `altup` or `sameup`.
        num_blocks: K, how many times as wide the state between the layers becomes.
        selection: Which block each layer works on; by default that of the method.
        k: The same as `num_blocks`.
        example: Arguments to run the model with, where `input_ids` alone do not fit it.
        stacks: Names of the lists of layers to widen, `["model.encoder.layers"]` say; by default all.
        layers: A run of layers of each stack, `slice(6, None)` or `[2, 3, 4]`, or a dict with one for each stack.
        seed: Of the noise that parts blocks which training would keep equal.

    Returns:
        The same model object.

    Examples:
        >>> import altup
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=20))
        >>> before = sum(p.numel() for p in model.parameters())
        >>> model = altup.widen(model, "recycled", num_blocks=2)
        >>> sum(p.numel() for p in model.parameters()) - before  # K² + K a layer
        12
    """
    plan = WideningPlan.choose(method, num_blocks if k is None else k, selection, seed)
    if isinstance(model, PreTrainedModel):
        refuse_not_finite(model)
    if isinstance(model, PreTrainedModel) and is_wide(model):
        return _widen_further(model, plan, example, selection is None and stacks is None and layers is None)
    _check(model)
    structure = structure_of(model, example, stacks)
    found, order, before = find_stacks(model, structure)
    plan.stacks = {stack.name: stack.returns_tuple for stack in found}
    if layers is not None:
        plan.choose_layers(model, layers)
    _tell_what_is_not_run(model, plan, parts_not_run(model, found, order))
    entries = Entries({}, {}) if plan.recycled else find_entries(model, structure, found, order)
    widths = {stack.width for stack in found}
    inputs = structure.example or {}
    checks = [(inputs, before)]
    if not plan.recycled and (asked := as_generate_asks(model, inputs)):
        checks.append((asked, run(model, asked)))
    try:
        _try(model, plan, entries.tables, widths, checks)
    except UserError:
        if not entries.features:
            raise
        _try(model, plan, entries.tables | entries.features, widths, checks)
    plan.save(model)
    finish(model)
    return model


def _widen_further(
    model: PreTrainedModel, plan: WideningPlan, example: dict[str, Any] | None, keeps_the_rest: bool
) -> PreTrainedModel:
    """From K blocks to m·K; everything else stays as it was chosen at first."""
    old = WideningPlan.required(model)
    K = old.num_blocks
    if plan.method != old.method or plan.num_blocks % K or plan.num_blocks == K or not keeps_the_rest:
        raise UserError(
            f"the model is widened already ({old.method}, K = {K}) and grows by more copies of its blocks: give "
            f"method={old.method!r}, {2 * K} blocks or another multiple, and no more; or narrow it first"
        )
    inputs = structure_of(model, example).example or {}
    new = replace_fields(old, num_blocks=plan.num_blocks, seed=plan.seed)
    before = run(model, inputs)
    undo = grow(model, old, new)
    try:
        _compare(model, new, before, run(model, inputs))
    except Exception:
        undo()
        raise
    new.save(model)
    return model


def _try(
    model: PreTrainedModel,
    plan: WideningPlan,
    entries: dict[str, int],
    widths: set[int],
    checks: list[tuple[dict[str, Any], dict[str, Tensor]]],
) -> None:
    """Widen `entries`, the layers and all that reads them, or refuse and leave the model as it was.

    `checks` are examples with what the model made of them; the first runs through all that is widened.
    """
    plan.repeated, plan.shared, plan.untied, plan.dropouts = {}, {}, {}, {}
    try:
        _widen_entries(model, plan, entries)
        widen_layers(model, plan)
        with widening_readers(model, plan, widths), functional_dropouts(model, plan, widths) as dropouts:
            run(model, checks[0][0])
        share_masks(model, plan)
        # Once more: a matrix widened in the middle of a run may have read a narrow tensor before.
        for example, before in checks:
            _compare(model, plan, before, run(model, example))
    except Exception as error:
        _undo(model, plan)
        if isinstance(error, UnfitError):
            raise unrecognised(model, str(error)) from error
        if isinstance(error, UserError):
            raise
        raise unrecognised(
            model,
            f"with {_some(plan.repeated) or 'its layers'} widened it fails: {told(error)}",
            recycle=not plan.recycled,
        ) from error
    if dropouts and not plan.recycled:
        warnings.warn(
            f"widen: in training {type(model).__name__} drops of each block for itself (a call of "
            f"torch.nn.functional.dropout with p={dropouts[0]:g}), which is noise between the blocks; build the "
            "model with a dropout of 0, or take method='recycled'",
            stacklevel=3,
        )


def narrow(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `widen`, in place: the original weights and class, while all blocks are still equal.

    Training the layers alone keeps them equal; once the coefficients or the blocks of a wide parameter have moved
    there is no narrow model that computes the same, and this refuses.

    Args:
        model: A model that `widen` has widened.

    Returns:
        The same model object, as it was before.

    Examples:
        >>> import altup
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=20))
        >>> altup.narrow(altup.widen(model)) is model
        True
    """
    plan = WideningPlan.of(model)
    if not isinstance(model, PreTrainedModel) or plan is None or not is_wide(model):
        raise UserError(
            f"{type(model).__name__} is not a model that altup.widen has widened; take it out of what wraps it "
            "(PEFT: merge_and_unload, or unload)"
        )
    _check_coefficients(model, plan)
    _undo(model, plan)
    return model


def apply(model: PreTrainedModel, plan: WideningPlan) -> None:
    """Do to a fresh model what the plan says was done to the one it comes from."""
    noted = WideningPlan(**{**vars(plan), "repeated": {}, "shared": {}, "untied": {}})
    for name, table in plan.untied.items():
        if model.get_parameter(name) is model.get_parameter(table):
            replace(model, [name], model.get_parameter(name).detach().clone())
    forget_ties(model, plan)
    for names, shared in ((plan.repeated, False), (plan.shared, True)):
        for name, dim in names.items():
            if name not in (noted.shared if shared else noted.repeated):
                widen_parameter(model, noted, name, dim, shared)
    widen_layers(model, plan)
    share_masks(model, plan)
    finish(model)


def widen_layers(model: PreTrainedModel, plan: WideningPlan) -> None:
    for stack, returns_tuple in plan.stacks.items():
        layers = plan.wide_layers(model, stack)
        rule = plan.rule(len(layers))
        for i, layer in enumerate(layers.values()):
            place = Place(
                plan.num_blocks,
                rule.active[i],
                i == 0,
                i == len(layers) - 1,
                plan.recycled,
                returns_tuple,
                first_argument(layer),
            )
            widen_layer(layer, rule.updates[i], place)
        watch_stack(model, stack)


def finish(model: PreTrainedModel) -> None:
    """What a model must know to be loaded."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module._keep_in_fp32_modules_strict = {*(module._keep_in_fp32_modules_strict or ()), "altup"}
    model.register_load_state_dict_pre_hook(_accept_original)
    watch_for_decay(model)


def _accept_original(model: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Let the state of the original model be loaded: wide where the model is wide, coefficients as they start.

    Of a part of it, such as adapters, only the layers that are there whole: others keep their coefficients.
    """
    plan = WideningPlan.of(model)
    if plan is None or any(".altup." in name for name in state_dict):
        return
    K = plan.num_blocks

    def is_narrow(name: str, dim: int) -> bool:
        given = state_dict.get(prefix + name)
        return given is not None and given.shape[dim] * K == model.get_parameter(name).shape[dim]

    for name, table in plan.untied.items():
        if is_narrow(table, plan.repeated[table]):
            state_dict.setdefault(prefix + name, state_dict[prefix + table])
    for names, widened in ((plan.repeated, repeat), (plan.shared, share)):
        for name, dim in names.items():
            if is_narrow(name, dim):
                state_dict[prefix + name] = widened(state_dict[prefix + name], dim, K)
    for stack in plan.stacks:
        layers = plan.wide_layers(model, stack)
        for (name, layer), update in zip(layers.items(), plan.rule(len(layers)).updates, strict=True):
            place = f"{prefix}{name}."
            if all(place + own in state_dict for own in layer.state_dict() if not own.startswith("altup.")):
                for own, value in update.state_dict().items():
                    state_dict[f"{place}altup.{own}"] = value


def _check(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is not a Hugging Face model (PreTrainedModel); for a model of your own use "
            "altup.AltUp, and widen before torch.compile or other wrappers"
        )
    if isinstance(model.config, AltUpConfig):
        raise UserError(
            f"{type(model).__name__} has AltUp built in; set its config's widening, or use altup.upcycle"
        )
    if any(hasattr(config, "altup_num_inputs") for config in configs_of(model)):
        raise UserError(
            f"{type(model).__name__} has AltUp of its own (altup_num_inputs in its config, as Gemma 3n has); its "
            "state is wide already. altup.accelerate(model) makes Gemma 3n faster"
        )
    if WideningPlan.of(model) is not None:
        raise UserError(
            "the model's config says that it was widened; load its folder with altup.load_widened, or "
            "narrow it first"
        )
    for config in configs_of(model):
        for field in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(config, field, 0):
                raise UserError(
                    f"{field}={getattr(config, field)} of the {config.model_type!r} config skips whole layers in "
                    "training, and a widened stack needs its first and last one; build the model with 0"
                )


def _tell_what_is_not_run(model: PreTrainedModel, plan: WideningPlan, parts: dict[str, bool]) -> None:
    """Warn of parts that nobody looked at; refuse where what they make may meet a state that is wider now."""
    towers = [name for name, holds_layers in parts.items() if holds_layers]
    if towers and not plan.recycled:
        raise UserError(
            f"{type(model).__name__} cannot be widened by {plan.method!r}: the example does not run "
            f"{_some(towers)}, whose output may be too narrow for the widened state. Give an example with every "
            "input that the model takes: widen(model, example={...}); or take method='recycled', which leaves the "
            "width of embeddings and features alone"
        )
    if parts:
        warnings.warn(
            f"widen: the example does not run {_some(list(parts))} of {type(model).__name__}; these parts stay as "
            "they are and were not compared (give widen(model, example={...}) with inputs for them)",
            stacklevel=3,
        )


def _widen_entries(model: PreTrainedModel, plan: WideningPlan, entries: dict[str, int]) -> None:
    for name in entries:
        untie(model, plan, name)
    for name, dim in entries.items():
        if name not in plan.repeated:
            widen_parameter(model, plan, name, dim)


def _compare(
    model: PreTrainedModel, plan: WideningPlan, before: dict[str, Tensor], after: dict[str, Tensor]
) -> None:
    """Refuse a model that computes something else, for whatever reason, once widened."""
    for name, output in before.items():
        error = difference(output, after[name]) if name in after else math.inf
        if not error <= tolerance(output):
            raise unrecognised(
                model,
                f"widened, it computes something else ({name}: relative error {error:.2g}); nothing was changed",
                recycle=not plan.recycled,
            )


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(list(names)[:3]) + more


def is_wide(model: PreTrainedModel) -> bool:
    """Whether the layers are wide that the config says are."""
    try:
        plan = WideningPlan.of(model)
        layers = _wide_layers(model, plan) if plan else {}
    except (AttributeError, TypeError, ValueError):  # the config is that of another class, or was damaged
        return False
    return bool(layers) and all(hasattr(layer, "place") for layer in layers.values())


def _wide_layers(model: PreTrainedModel, plan: WideningPlan) -> dict[str, Any]:
    return {name: layer for stack in plan.stacks for name, layer in plan.wide_layers(model, stack).items()}


def _check_coefficients(model: PreTrainedModel, plan: WideningPlan) -> None:
    for name, layer in _wide_layers(model, plan).items():
        P, g = layer.altup.P.double(), layer.altup.g
        if (P.sum(dim=1) - 1).abs().max() > 1e-5 or not torch.equal(g, torch.ones_like(g)):
            raise UserError(
                f"{name}.altup has moved: the blocks no longer take the same steps, so no narrow model "
                "computes the same; keep the widened one"
            )


def _undo(model: PreTrainedModel, plan: WideningPlan) -> None:
    """Everything back, or an error and nothing changed."""
    values = {n: unrepeat(n, model.get_parameter(n), dim, plan.num_blocks) for n, dim in plan.repeated.items()}
    for name, dim in plan.shared.items():
        values[name] = unshare(values.get(name, model.get_parameter(name)), dim, plan.num_blocks)
    for name, table in plan.untied.items():
        mine, its = (values.get(n, model.get_parameter(n)) for n in (name, table))
        if not torch.equal(mine, its):
            raise UserError(f"{name} was tied to {table} and has been trained apart; keep the widened model")
    for name, value in values.items():
        replace(model, names_of(model, model.get_parameter(name)), value.detach())
    unwatch(model)
    separate_masks(model, plan)
    for layer in _wide_layers(model, plan).values():
        if hasattr(layer, "place"):
            narrow_layer(layer)
    if plan.untied:
        tie_again(model, plan)
    if WideningPlan.of(model) is not None:
        del model.config.altup
