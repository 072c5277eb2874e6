"""A pretrained model widened so that it starts as exactly the function it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from altup.core.errors import MOST_SEED, UserError, check_choice, check_whole, named
from altup.core.hub import find_pretrained
from altup.core.pretrained import copy_tokenizer, load_config, load_model
from altup.core.sealed_folders import new_sealed_folder
from altup.models.accounting import refuse_too_large
from altup.models.base import empty_like
from altup.models.config import AltUpConfig
from altup.models.families import FAMILIES
from altup.models.methods import MOST, PRESETS, preset_fields
from altup.models.methods.altup import COEFFICIENTS
from altup.models.widening.parameters import spread
from altup.models.widening.probe import difference, refuse_not_finite, run, tolerance
from altup.nn import AltUp
from altup.transformers_hooks import is_widened

UPCYCLE_METHODS = tuple(name for name, preset in PRESETS.items() if preset.upcycles)


def upcycle(
    model: PreTrainedModel | str | Path,
    method: str = "recycled",
    num_blocks: int = 2,
    seed: int = 0,
    coefficients: str = "static",
) -> Any:
    """A `recycled`, `altup` or `sameup` model that computes what the pretrained `model` computes, up to rounding.

    `model` is a Hugging Face T5 1.1, Flan-T5, BERT (`BertForMaskedLM`) or Llama, a dense model of altup, or a
    folder or hub name of any of these. `dense` only converts. All K blocks start equal; where nothing would
    ever tell two of them apart, noise in P whose rows sum to zero (from `seed`) lets training part them without
    changing the function.

    Args:
        model: A model, its folder, or its name on the hub.
        method: `recycled`, `altup`, `sameup` or `dense`.
        num_blocks: K, how many blocks the new model has.
        seed: Of the noise that parts blocks which training would keep equal.
        coefficients: `static`, `dynamic` or, not for `recycled`, `fixed`.

    Returns:
        A new model of altup; the old one stays unchanged.

    Examples:
        >>> import altup
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape))
        >>> type(altup.upcycle(llama, "altup", num_blocks=2)).__name__
        'AltUpDecoderForCausalLM'
    """
    check_choice("method", method, UPCYCLE_METHODS)
    check_whole("num_blocks", num_blocks, 1, MOST["num_blocks"])
    check_whole("seed", seed, 0, MOST_SEED)
    check_choice("coefficients", coefficients, COEFFICIENTS)
    stays_dense = method == "dense" or num_blocks == 1
    if stays_dense and coefficients != "static":
        given = "method='dense'" if method == "dense" else "num_blocks=1"
        raise UserError(
            f"{named('coefficients', coefficients)} does not fit {given}, which has no coefficients; leave it "
            "unset"
        )
    if coefficients == "fixed" and method == "recycled":
        raise UserError(
            f"{named('coefficients', coefficients)} does not fit {named('method', method)}, whose blocks would "
            "always stay equal; take method 'altup' or 'sameup', or leave coefficients unset"
        )
    original = load_pretrained(str(model)) if isinstance(model, str | Path) else model
    if isinstance(original, PreTrainedModel):
        refuse_not_finite(original)
    dense = _as_dense(original)
    wide = dense if stays_dense else _widened(dense, method, num_blocks, seed, coefficients)
    _compare(original, wide)
    return wide


def _widened(dense: Any, method: str, num_blocks: int, seed: int, coefficients: str) -> Any:
    """A new model with `num_blocks` copies of what `dense` computes."""
    fields: dict[str, Any] = dense.config.to_dict() | preset_fields(method, num_blocks)
    fields |= {"shared_dropout": True, "coefficients": coefficients}
    if any(name.endswith("lm_head.weight") for name in dense.reads_blocks) and fields["widening"] == "altup":
        fields["tie_word_embeddings"] = False  # a head that shares its weights out is no longer the table
    wide: Any = empty_like(type(dense), type(dense.config)(**fields), dense)
    with torch.no_grad():
        for name, weight in dense.state_dict().items():
            parameter = wide.get_parameter(name)
            parameter.copy_(spread(weight, parameter.shape, name.endswith(dense.reads_blocks)))
        generator = torch.Generator().manual_seed(seed)
        rules = [module for module in wide.modules() if isinstance(module, AltUp)]
        if coefficients == "fixed":
            _refuse_twins(rules)
        for rule in rules:
            for update in rule.updates:  # not the rule itself, which would part twins by chance and not by `seed`
                update.reset_parameters()  # type: ignore[operator]
            if rule.has_twins:
                rule.part_twins(generator=generator)
    if wide.can_generate():
        wide.generation_config = copy.deepcopy(dense.generation_config)
    return wide


def _refuse_twins(rules: list[AltUp]) -> None:
    """UserError where blocks would stay equal: no layer tells them apart, and there is no P to give noise to."""
    num_blocks, read = rules[0].num_blocks, {block for rule in rules for block in rule.active}
    if num_blocks - len(read) > 1:
        raise UserError(
            f"coefficients='fixed' does not fit {named('num_blocks', num_blocks)} here: layers read {len(read)} "
            "of the "
            "blocks, and the others would always stay equal; give fewer blocks, or leave coefficients unset"
        )


def _as_dense(model: PreTrainedModel) -> Any:
    convertible = [one for one in FAMILIES.values() if one.convert is not None]
    for one in convertible:
        if isinstance(model, one.hugging_face):
            return one.convert(model)  # type: ignore[misc]
    if not isinstance(model, tuple(one.model_class for one in FAMILIES.values())):
        raise UserError(
            f"{type(model).__name__} cannot be upcycled; give a "
            f"{', '.join(one.hugging_face.__name__ for one in convertible)} or a dense model of altup; "
            "altup.widen takes others"
        )
    if not model.config.is_plain:
        raise UserError(
            f"the model is widened already (widening={model.config.widening!r}, "
            f"{named('num_blocks', model.config.num_blocks)}); give a dense one"
        )
    return copy.deepcopy(model).eval()


def load_pretrained(place: str, only: tuple[Any, ...] = ()) -> PreTrainedModel:
    """A model that `upcycle` takes, from a folder or the hub; of the classes `only`."""
    place = find_pretrained(place)
    config = load_config(place)
    if isinstance(config, AltUpConfig):
        refuse_too_large(config)
    model: PreTrainedModel = load_model(find_class(config, place, only), place)
    return model


def find_class(config: PreTrainedConfig, place: str, only: tuple[Any, ...] = ()) -> Any:
    """The class that loads a model that `upcycle` takes; UserError for any other model."""
    originals = [one.hugging_face for one in FAMILIES.values() if one.hugging_face]
    taken = only or (*originals, *(one.model_class for one in FAMILIES.values()))
    classes: dict[str, Any] = {cls.config_class.model_type: cls for cls in taken}
    if config.model_type not in classes:
        raise UserError(f"{place!r} holds a {config.model_type!r} model; give one of {', '.join(classes)}")
    if is_widened(config):
        raise UserError(
            f"{place!r} was widened by altup.widen, and only altup.load_widened reads it; give the original"
        )
    return classes[config.model_type]


@dataclass(frozen=True)
class Upcycled:
    """A wider model that was saved: how it compares with the original, and whether its tokenizer came along."""

    num_blocks: int
    parameters: int
    parameters_before: int
    difference: float  # of the logits, relative to the original's
    no_tokenizer: str  # why it did not come along; empty where it did


def upcycle_to_folder(
    place: str,
    out: Path,
    method: str,
    num_blocks: int,
    seed: int,
    say: Callable[[str], Any],
    coefficients: str = "static",
) -> Upcycled:
    """Upcycle the model of a folder or of the hub into a new folder, and compare it with the original."""
    with new_sealed_folder(out) as folder:
        say(f"Loading {place}")
        original = load_pretrained(place)
        say("Widening, and comparing with the original")
        wide = upcycle(original, method, num_blocks, seed, coefficients)
        error = _compare(original, wide)
        wide.save_pretrained(folder)
        parameters = wide.num_parameters(), original.num_parameters()
        return Upcycled(wide.config.num_blocks, *parameters, error, copy_tokenizer(place, folder))


@torch.no_grad()
def _compare(original: Any, wide: Any) -> float:
    """The relative difference of the logits; UserError where it is more than rounding makes."""
    positions = getattr(original.config, "max_position_embeddings", None) or 24
    rows = wide.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(3, rows - 1), rows, (2, min(24, positions)), generator=generator)
    inputs = {"input_ids": ids}
    if wide.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :8]
    before, after = (run(model, inputs)["logits"] for model in (original, wide))
    found = difference(before, after)
    if not found <= tolerance(before):
        raise UserError(
            f"upcycled, this {type(original).__name__} computes something else (relative error of the logits "
            f"{found:.2g}); it was not kept. altup.widen may take it"
        )
    return found
