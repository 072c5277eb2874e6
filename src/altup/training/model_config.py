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
from altup.training.pretraining import PretrainConfig

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig

# What `method` replaces, beside the settings of methods.
CHOICE_FIELDS = ("widening", "num_blocks", "selection", "coefficients", "sequence", "stride", "experts")


def find_model_config(path: Path | None = None, model: str | None = None, **flags: Any) -> AltUpConfig:
    """The model that a file and flags (`MODEL_NAMES` and fields of the config) describe; without a file T5, base
    and dense where the flags say nothing.

    `path` is a model folder or a run, a model's config.json, or the YAML file of a run: then the model is the one
    that `altup pretrain --config FILE` would train with these flags. `model` is the family.
    """
    if path is None:
        config: AltUpConfig = family(model or "t5").config_class.from_preset(**flags)
        return config
    if path.is_dir():  # of a run its model, which knows its vocabulary
        path = newest_model(path) / "config.json"
    if path.suffix != ".json":
        return _of_run_file(path, {"model": model, **flags} if model else flags)
    values = _read_json(path)
    of_file = family_name(values.get("model_type"))
    if of_file is None:
        raise UserError(
            f"{path}: {named('model_type', values.get('model_type'))} is not an altup model; give a folder saved "
            "by altup, or convert the model with `altup upcycle` first"
        )
    if model not in (None, of_file):
        raise UserError(f"--model {model}: {path} describes a {of_file!r} model; remove --model")
    config_class = family(of_file).config_class
    refuse_unknown(str(path), values, _config_fields(config_class))
    return _with_flags(config_class, values, flags)


def _of_run_file(path: Path, flags: dict[str, Any]) -> AltUpConfig:
    if source := read_yaml(path).get("from_model"):
        raise UserError(f"{path}: the run starts from {source}, which it does not describe; give its folder")
    settings = {name: value for name, value in flags.items() if name in describe_settings(PretrainConfig)}
    fields = {name: value for name, value in flags.items() if name not in settings}
    settings |= {"data": "not read", "model_overrides": fields}
    return PretrainConfig.resolve({}, path, settings).named_model()


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
    return {
        *config_class().to_dict(),
        *config_class.field_names(),
        "architectures",
        "dtype",
        "transformers_version",
        "model_type",
    }


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
