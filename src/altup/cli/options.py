"""The model options that every verb shares: `--size --method --k --stride --experts --extra-layers --config`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.errors import UserError, check_choice

if TYPE_CHECKING:
    from altup.models.t5.config import AltUpT5Config

Size = Annotated[
    str | None, typer.Option("--size", help="Shape: tiny, small, base, large or xl.", rich_help_panel="Model")
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
    typer.Option("--extra-layers", help="Layers added to encoder and decoder each.", rich_help_panel="Model"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A run's YAML file, or a model folder or its config.json. Flags win over it.",
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
) -> AltUpT5Config:
    """The model that flags and file describe; base and dense where neither says anything.

    A flag wins over the file, and `--method` replaces the file's method together with its k, stride and experts.
    `run_fields` are names that a run file may also hold and that say nothing about the model.
    """
    flags = {
        name: value
        for name, value in zip(MODEL_NAMES, (size, method, k, stride, experts, extra_layers), strict=True)
        if value is not None
    }
    if config is None:
        return _from_names(flags)
    path = config / "config.json" if config.is_dir() else config
    values = _read(path)
    if path.suffix == ".json":
        return _from_saved_model(path, values, flags)
    return _from_run_file(path, values, flags, run_fields)


def _from_names(names: dict[str, Any]) -> AltUpT5Config:
    from altup.models.t5.config import AltUpT5Config

    return AltUpT5Config.from_preset(**names)


def _from_run_file(
    path: Path, values: dict[str, Any], flags: dict[str, Any], run_fields: Collection[str]
) -> AltUpT5Config:
    """The model of the file's names and fields, with the flags laid over it."""
    from altup.models.t5.config import SIZES, AltUpT5Config

    overrides = values.pop("model_overrides", None) or {}
    if not isinstance(overrides, dict):
        raise UserError(f"{path}: model_overrides={overrides!r}: expected `name: value` pairs")
    values |= overrides
    known = {*MODEL_NAMES, *_config_fields()}
    _refuse_unknown(path, values, {*known, *run_fields})
    fields = {name: value for name, value in values.items() if name in known and value is not None}
    if "extra_layers" in flags:
        fields.pop("extra_layers", None)
    if "method" in fields:
        return _with_flags(_from_names(fields).to_dict(), flags)
    # Without a method, stride and experts are fields like any other.
    size = fields.pop("size", "base")
    check_choice("size", size, SIZES)
    if "k" in fields:
        fields["num_blocks"] = fields.pop("k")
    return _with_flags(AltUpT5Config(**{**SIZES[size], **fields}).to_dict(), flags)


def _from_saved_model(path: Path, values: dict[str, Any], flags: dict[str, Any]) -> AltUpT5Config:
    """A complete configuration, with the flags laid over its fields."""
    from altup.models.t5.config import AltUpT5Config

    kind = values.get("model_type")
    if kind != AltUpT5Config.model_type:
        raise UserError(
            f"{path}: model_type={kind!r} is not an altup model; give a folder saved by altup "
            f"(model_type {AltUpT5Config.model_type!r}), or convert the model with `altup upcycle` first"
        )
    _refuse_unknown(path, values, _config_fields())
    return _with_flags(values, flags)


def _with_flags(values: dict[str, Any], flags: dict[str, Any]) -> AltUpT5Config:
    """`--size` replaces the whole shape, `--method` all that says how it is widened."""
    from altup.models.config import preset_fields
    from altup.models.t5.config import SIZES, AltUpT5Config

    flags = dict(flags)
    if "size" in flags:
        check_choice("size", flags["size"], SIZES)
        values = {**values, **SIZES[flags.pop("size")], "num_decoder_layers": 0}
    if "method" in flags:
        chosen = preset_fields(*(flags.pop(name, None) for name in ("method", "k", "stride", "experts")))
        values = {name: value for name, value in values.items() if name not in CHOICE_FIELDS} | chosen
    if "k" in flags:
        values["num_blocks"] = flags.pop("k")
    return AltUpT5Config(**{**values, **flags})


def _config_fields() -> set[str]:
    from altup.models.t5.config import AltUpT5Config

    return {*AltUpT5Config().to_dict(), "architectures", "dtype", "transformers_version", "model_type"}


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
