"""A model's config from names (`--size`, `--method`) and a file: a saved model's config.json, or a run's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_choice, named
from altup.core.files import read_json
from altup.core.runs import newest_model
from altup.core.schema import describe_settings, read_yaml, refuse_unknown
from altup.models.families import family, family_name
from altup.models.methods import all_methods, preset_fields
from altup.training.pretraining import MODEL_NAMES, PretrainConfig

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig

# What `method` replaces, beside the settings of methods.
CHOICE_FIELDS = ("widening", "num_blocks", "selection", "coefficients", "sequence", "stride", "experts")


def find_model_config(path: Path | None = None, model: str | None = None, **flags: Any) -> AltUpConfig:
    """The model that a file and flags (`MODEL_NAMES`) describe; T5, base and dense where neither says anything.

    `path` is a file, a model folder or a run. A flag wins over it, and `method` replaces the file's method
    together with its k, stride and experts. `model` is the family, where the file does not tell.
    """
    if path is None:
        config: AltUpConfig = family(model or "t5").config_class.from_preset(**flags)
        return config
    if path.is_dir():  # of a run its model, which knows its vocabulary
        path = newest_model(path) / "config.json"
    is_json = path.suffix == ".json"
    values = _read_json(path) if is_json else read_yaml(path)
    if is_json:
        of_file = family_name(values.get("model_type"))
        if of_file is None:
            raise UserError(
                f"{path}: {named('model_type', values.get('model_type'))} is not an altup model; give a folder "
                "saved by "
                "altup, or convert the model with `altup upcycle` first"
            )
    else:
        if source := values.get("from_model"):
            raise UserError(f"{path}: the run starts from {source}, which it does not describe; give its folder")
        of_file = values.pop("model", None) or model or "t5"
    if model not in (None, of_file):
        raise UserError(f"--model {model}: {path} describes a {of_file!r} model; leave --model out")
    config_class = family(of_file).config_class
    if is_json:
        refuse_unknown(str(path), values, _config_fields(config_class))
        return _with_flags(config_class, values, flags)
    return _from_run_file(config_class, path, values, flags)


def _from_run_file(config_class: Any, path: Path, values: dict[str, Any], flags: dict[str, Any]) -> AltUpConfig:
    """The model of the file's names and fields, with the flags laid over it. What else it says is how to train."""
    overrides = values.pop("model_overrides", None) or {}
    if not isinstance(overrides, dict):
        raise UserError(f"{path}: {named('model_overrides', overrides)}: expected `name: value` pairs")
    values |= overrides
    known = {*MODEL_NAMES, *_config_fields(config_class)}
    refuse_unknown(str(path), values, {*known, *describe_settings(PretrainConfig)})
    fields = {name: value for name, value in values.items() if name in known and value is not None}
    if "extra_layers" in flags:
        fields.pop("extra_layers", None)
    if "method" in fields:
        return _with_flags(config_class, config_class.from_preset(**fields).to_dict(), flags)
    # Without a method, stride and experts are fields like any other.
    size = fields.pop("size", "base")
    check_choice("size", size, config_class.SIZES)
    if "k" in fields:
        fields["num_blocks"] = fields.pop("k")
    config = config_class(**{**config_class.SIZES[size], **fields})
    return _with_flags(config_class, config.to_dict(), flags)


def _with_flags(config_class: Any, values: dict[str, Any], flags: dict[str, Any]) -> AltUpConfig:
    """`size` replaces the whole shape, `method` all that says how it is widened."""
    flags = dict(flags)
    if "size" in flags:
        check_choice("size", flags["size"], config_class.SIZES)
        values = {**values, **config_class.SIZES[flags.pop("size")]}
        if "num_decoder_layers" in values:
            values["num_decoder_layers"] = 0
    if "method" in flags:
        chosen = preset_fields(*(flags.pop(name, None) for name in ("method", "k", "stride", "experts")))
        replaced = {*CHOICE_FIELDS, *(name for method in all_methods() for name in method.settings)}
        values = {name: value for name, value in values.items() if name not in replaced} | chosen
    if "k" in flags:
        values["num_blocks"] = flags.pop("k")
    config: AltUpConfig = config_class(**{**values, **flags})
    return config


def _config_fields(config_class: Any) -> set[str]:
    return {*config_class().to_dict(), "architectures", "dtype", "transformers_version", "model_type"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file or a model folder") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected names and values, found {type(values).__name__}")
    return values
