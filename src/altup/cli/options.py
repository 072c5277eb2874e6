"""The model options that every verb shares: `--model --size --method --k --stride --experts --extra-layers
--config`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.core.errors import UserError, check_choice

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig

Model = Annotated[
    str | None, typer.Option("--model", help="Family: t5 (default), bert or decoder.", rich_help_panel="Model")
]
Size = Annotated[
    str | None,
    typer.Option("--size", help="Shape: tiny, small (bert: light), base, large or xl.", rich_help_panel="Model"),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="dense, altup, sameup, recycled, sum, dense-wide, sequence-altup, stride-and-skip, "
        "average-pooling, moe; join several with '+'.",
        rich_help_panel="Model",
    ),
]
K = Annotated[int | None, typer.Option("--k", help="Blocks of a widened representation.", rich_help_panel="Model")]
Stride = Annotated[
    int | None, typer.Option("--stride", help="Stride of a sequence method.", rich_help_panel="Model")
]
Experts = Annotated[
    int | None, typer.Option("--experts", help="Partial experts beside each layer.", rich_help_panel="Model")
]
ExtraLayers = Annotated[
    int | None,
    typer.Option("--extra-layers", help="Layers added to each stack.", rich_help_panel="Model"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A run or model folder, its config.json, or a YAML file. Flags win over it.",
        rich_help_panel="Model",
    ),
]

# What a run file calls the choice of a model; beside these it may name any field of the model's config.
MODEL_NAMES = ("size", "method", "k", "stride", "experts", "extra_layers")
CHOICE_FIELDS = ("widening", "num_blocks", "selection", "sequence", "stride", "experts")


def model_config(
    size: str | None = None,
    method: str | None = None,
    k: int | None = None,
    stride: int | None = None,
    experts: int | None = None,
    extra_layers: int | None = None,
    config: Path | None = None,
    run_fields: Collection[str] = (),
    model: str | None = None,
) -> AltUpConfig:
    """The model that flags and file describe; T5, base and dense where neither says anything.

    A flag wins over the file, and `--method` replaces the file's method together with its k, stride and experts.
    `run_fields` are names that a run file may also hold and that say nothing about the model.
    """
    from altup.models.families import family, family_name

    flags = {
        name: value
        for name, value in zip(MODEL_NAMES, (size, method, k, stride, experts, extra_layers), strict=True)
        if value is not None
    }
    if config is None:
        return _from_names(family(model or "t5").config_class, flags)
    path = config
    if config.is_dir():  # of a run its model, which knows its vocabulary
        from altup.training.run_folder import newest_model

        path = newest_model(config) / "config.json"
    values = _read(path)
    if path.suffix == ".json":
        of_file = family_name(values.get("model_type"))
        if of_file is None:
            raise UserError(
                f"{path}: model_type={values.get('model_type')!r} is not an altup model; give a folder saved by "
                "altup, or convert the model with `altup upcycle` first"
            )
    else:
        of_file = values.pop("model", None) or model or "t5"
    if model not in (None, of_file):
        raise UserError(f"--model {model}: {path} describes a {of_file!r} model; leave --model out")
    config_class = family(of_file).config_class
    if path.suffix == ".json":
        _refuse_unknown(path, values, _config_fields(config_class))
        return _with_flags(config_class, values, flags)
    return _from_run_file(config_class, path, values, flags, run_fields)


def _from_names(config_class: Any, names: dict[str, Any]) -> AltUpConfig:
    config: AltUpConfig = config_class.from_preset(**names)
    return config


def _from_run_file(
    config_class: Any, path: Path, values: dict[str, Any], flags: dict[str, Any], run_fields: Collection[str]
) -> AltUpConfig:
    """The model of the file's names and fields, with the flags laid over it."""
    overrides = values.pop("model_overrides", None) or {}
    if not isinstance(overrides, dict):
        raise UserError(f"{path}: model_overrides={overrides!r}: expected `name: value` pairs")
    values |= overrides
    known = {*MODEL_NAMES, *_config_fields(config_class)}
    _refuse_unknown(path, values, {*known, *run_fields})
    fields = {name: value for name, value in values.items() if name in known and value is not None}
    if "extra_layers" in flags:
        fields.pop("extra_layers", None)
    if "method" in fields:
        return _with_flags(config_class, _from_names(config_class, fields).to_dict(), flags)
    # Without a method, stride and experts are fields like any other.
    size = fields.pop("size", "base")
    check_choice("size", size, config_class.SIZES)
    if "k" in fields:
        fields["num_blocks"] = fields.pop("k")
    config = config_class(**{**config_class.SIZES[size], **fields})
    return _with_flags(config_class, config.to_dict(), flags)


def _with_flags(config_class: Any, values: dict[str, Any], flags: dict[str, Any]) -> AltUpConfig:
    """`--size` replaces the whole shape, `--method` all that says how it is widened."""
    from altup.models.config import preset_fields

    flags = dict(flags)
    if "size" in flags:
        check_choice("size", flags["size"], config_class.SIZES)
        values = {**values, **config_class.SIZES[flags.pop("size")]}
        if "num_decoder_layers" in values:
            values["num_decoder_layers"] = 0
    if "method" in flags:
        chosen = preset_fields(*(flags.pop(name, None) for name in ("method", "k", "stride", "experts")))
        values = {name: value for name, value in values.items() if name not in CHOICE_FIELDS} | chosen
    if "k" in flags:
        values["num_blocks"] = flags.pop("k")
    config: AltUpConfig = config_class(**{**values, **flags})
    return config


def _config_fields(config_class: Any) -> set[str]:
    return {*config_class().to_dict(), "architectures", "dtype", "transformers_version", "model_type"}


def _refuse_unknown(path: Path, values: dict[str, Any], known: Collection[str]) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise UserError(f"{path}: unknown key {name!r}; {hint}")


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}; give a YAML file or a model folder") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: not readable as {path.suffix[1:] or 'YAML'}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected names and values, found {type(values).__name__}")
    return values
