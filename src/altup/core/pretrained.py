"""The one way to load a config, a tokenizer or a model, which may come from anyone.

No Python of a model folder is run and no pickle is read, whatever its files ask for, and nobody is asked about it.
A model whose weights are not all there is refused: Hugging Face would make up the missing ones.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, check_range, check_whole, is_out_of_memory
from altup.core.files import check_file_name, check_regular, read_json, read_mapping
from altup.core.hardware import host_memory
from altup.core.packages import require
from altup.core.text import shorten
from altup.core.tokenizer_trial import check_added, try_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_LAYERS = 10_000  # more are no model, but would take hours to build
SAFETENSORS = ".safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_TOKEN = 1 << 31
FLOATS = ("F", "BF")  # how safetensors' names of floating-point types begin
ADAPTER = "adapter_config.json"
WHERE = ("subfolder", "revision", "token", "cache_dir")  # options that say where files lie
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "tokenizer.model", "vocab.txt")
MAPPINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
ADVICE = "trust_remote_code"


def load_config(place: str | Path, config_class: Any = None, **where: Any) -> PreTrainedConfig:
    """The config of a model in a folder or on the hub; of `config_class` where its model type does not tell."""
    from transformers import AutoConfig

    _refuse_pipes(place)
    try:
        config = (config_class or AutoConfig).from_pretrained(place, trust_remote_code=False, **where)
    except Exception as error:  # the library raises many types for files that hold anything
        raise UserError(f"{str(place)!r} holds no model that can be read: {_reason(error, place)}") from error
    _check_config(str(place), config)
    return config


def load_tokenizer(place: str | Path) -> Any:
    """The tokenizer in a folder or on the hub. It is tried, first in a child process: some damage shows in use."""
    from transformers import AutoTokenizer

    _refuse_pipes(place)
    try:
        if file := _find(str(place), "tokenizer.json", {}):
            try_tokenizer(file)
        _refuse_many_added(place)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        tokenizer.decode(tokenizer("a b").input_ids)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # as above; a panic of a library in Rust is no Exception
        if "tiktoken" in str(error) or "sentencepiece" in str(error).lower():  # the first is tried without this
            require("sentencepiece", f"the tokenizer of {str(place)!r}")
        raise UserError(f"{str(place)!r} holds no tokenizer that can be read: {_reason(error, place)}") from error


def _refuse_many_added(place: str | Path) -> None:
    """What the trial of a tokenizer.json does not see: tokens that the config beside it adds."""
    path, number = _find(str(place), "tokenizer_config.json", {}), 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # loading says it
        number = len(read_mapping(path)["added_tokens_decoder"]) if path else 0
    check_added(number)


def lacks_tokenizer(place: str) -> bool:
    """Whether `place` is a folder without any file of a tokenizer."""
    return Path(place).is_dir() and not any((Path(place) / name).exists() for name in TOKENIZER_FILES)


def copy_tokenizer(place: str, out: Path) -> str:
    """Save the tokenizer of a folder or of the hub in `out`; returns why it was not, or nothing.

    Without a file to read, the Auto class would make up an empty one.
    """
    if lacks_tokenizer(place):
        return "no tokenizer found beside the original; copy it yourself"
    try:
        load_tokenizer(place).save_pretrained(out)
    except UserError as error:
        return f"tokenizer not copied: {shorten(str(error), 300)}"
    return ""


def load_model(
    model_class: Any, place: str | Path, may_lack: Callable[[str], bool] | None = None, **options: Any
) -> Any:
    """The whole model in a folder or on the hub, from safetensors. `options` are those of `from_pretrained`.

    `may_lack` says which weights may start at random: those of a new head.
    """
    from safetensors import SafetensorError

    where = {name: options[name] for name in WHERE if name in options}
    config = options.get("config")
    if config is None:  # checked before it is built
        config = load_config(place, getattr(model_class, "config_class", None), **where)
    skeleton = _skeleton(model_class, config)
    if skeleton is not None:
        _refuse_too_large(str(place), skeleton, options.get("dtype"))
    files = _weight_files(str(place), where)
    if skeleton is not None and getattr(config, "quantization_config", None) is None:
        _refuse_other_kinds(str(place), skeleton, files)
    fixed = {"use_safetensors": True, "trust_remote_code": False}
    reported = {
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }  # other shapes: below
    try:
        with _no_bar_in_logs():
            model, info = model_class.from_pretrained(place, **{**options, **fixed, **reported})
    except UserError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{str(place)!r}: the weights cannot be read as safetensors: {_reason(error, place)}"
        ) from error
    except Exception as error:  # such as that of a generation_config.json with lists
        if is_out_of_memory(error):
            raise
        raise UserError(f"{str(place)!r} holds no model that can be built: {_reason(error, place)}") from error
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if lost := [name for name in lost if may_lack is None or not may_lack(name)]:
        raise UserError(
            f"{str(place)!r} is not whole: {len(lost)} weights are missing or misshapen, first {lost[0]}"
        )
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        if generation.decoder_start_token_id is None:
            generation.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", None)
        _check_tokens(str(place), generation, "generation_config.json")
    return model


def _check_tokens(place: str, holder: Any, file: str) -> None:
    """UserError where a special token is no whole number that can be one, nor a list of them."""
    for name, token in vars(holder).items():
        several = token if isinstance(token, list) else [token]
        numbers = [one for one in several if one is not None]
        if name.endswith("_token_id") and not all(type(one) is int and -1 <= one < MOST_TOKEN for one in numbers):
            raise UserError(f"{place!r}: {name}={token!r} of its {file} is no token's number")


@contextlib.contextmanager
def _no_bar_in_logs() -> Iterator[None]:
    """Without a terminal, transformers' bar of the weights would be a line of a log for each step of it."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _skeleton(model_class: Any, config: PreTrainedConfig) -> Any:
    """The model of a config on torch's meta device, without memory; None where it makes none: loading says why."""
    import torch

    build = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        with torch.device("meta"):
            return build(copy.deepcopy(config))
    except Exception:
        return None


def _refuse_too_large(place: str, skeleton: Any, dtype: Any) -> None:
    """UserError where the weights that a config asks for exceed this machine's memory, whatever its files hold."""
    import torch

    each = dtype.itemsize if isinstance(dtype, torch.dtype) else 2  # as they are stored: bf16, at least
    needed, there = each * sum(p.numel() for p in skeleton.parameters()), host_memory()
    if needed > there:
        raise UserError(
            f"{place!r} asks for {needed / 2**30:,.0f} GiB of weights, where this machine has "
            f"{there / 2**30:,.0f} GiB of memory; check the sizes in its config.json"
        )


def _refuse_other_kinds(place: str, skeleton: Any, files: list[Path]) -> None:
    """UserError where a weight is stored as whole numbers, truth values or complex numbers: it would be converted
    without a word."""
    from safetensors import SafetensorError, safe_open

    prefix = f"{skeleton.base_model_prefix}."
    floating = {name for name, weight in skeleton.named_parameters() if weight.dtype.is_floating_point}
    floating |= {name.removeprefix(prefix) for name in floating}
    for path in files:
        with (
            contextlib.suppress(OSError, SafetensorError),
            safe_open(path, framework="pt") as file,
        ):  # loading says it
            for name in file.keys():  # noqa: SIM118
                kind = file.get_slice(name).get_dtype()
                if name.removeprefix(prefix) in floating and not kind.startswith(FLOATS):
                    raise UserError(
                        f"{place!r}: {name} in {path.name} is stored as {kind}, and weights are floating-point "
                        "numbers; restore the file"
                    )


def _refuse_pipes(place: str | Path) -> None:
    """A folder's files must have an end."""
    if Path(place).is_dir():
        for path in Path(place).iterdir():
            check_regular(path)


def _check_config(place: str, config: PreTrainedConfig) -> None:
    """Refuse what a config may ask for beside a model: code on the hub, a pickle, layers without end."""
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str) and "/" in attention:
        raise UserError(
            f"{place!r}: attn_implementation={attention!r} is code on the hub, which altup does not run"
        )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and not str(weights).endswith((SAFETENSORS, f"{SAFETENSORS}.index.json")):
        raise UserError(f"{place!r}: transformers_weights={weights!r} is not a safetensors file; save it as one")
    for field in ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"):
        number = getattr(config, field, None)
        if isinstance(number, int):
            check_whole(f"{place}: {field}", number, 0, MOST_LAYERS)
    _check_tokens(place, config, "config.json")
    for name, value in _numbers(config.to_dict()):
        if math.isnan(value):
            raise UserError(f"{place}: {name}={value!r} of its config.json is no number")
        if name.endswith(("eps", "epsilon")):
            check_range(f"{place}: {name}", value, 0, 1)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All floating-point numbers of a config, with their names."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(one, f"{name}.{key}" if name else str(key))


def _weight_files(place: str, where: dict[str, Any]) -> list[Path]:
    """The safetensors files of a model; UserError where an index or an adapter leads to files of another kind,
    which may be pickles even where safetensors are asked for."""
    names = {WEIGHTS}
    if path := _find(place, INDEX, where):
        try:
            names = {str(name) for name in read_json(path)["weight_map"].values()}
            if not names:
                raise ValueError("it names no file")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no index of weights ({describe_problem(error)}); restore it") from None
        for name in names:
            if not check_file_name(name, str(path)).endswith(SAFETENSORS):
                raise UserError(f"{path} names {name!r}, and only safetensors are read; save the model as these")
    if _find(place, ADAPTER, where):
        raise UserError(f"{place!r} holds an adapter ({ADAPTER}); merge it into its model, and save that")
    return [found for name in sorted(names) if (found := _find(place, name, where))]


def describe_problem(error: Exception) -> str:
    """What is wrong with a file's content, where Python's own words say nothing."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (
        "it holds something else than it should" if isinstance(error, TypeError | AttributeError) else str(error)
    )


def _find(place: str, file: str, where: dict[str, Any]) -> Path | None:
    """A file of a folder, or of a repository in the cache or online."""
    from transformers.utils import cached_file

    problems = ("gated_repo", "missing_entries", "connection_errors")
    found = cached_file(place, file, **{f"_raise_exceptions_for_{what}": False for what in problems}, **where)
    return Path(found) if found else None


def _no_mapping(place: str | Path) -> str:
    """Which file of a folder holds JSON of another kind than it should; empty where none does."""
    for path in (Path(place) / name for name in MAPPINGS):
        try:
            if path.is_file():
                read_mapping(path)
        except (json.JSONDecodeError, UnicodeDecodeError, OSError):
            continue  # the library says it
        except ValueError as error:
            return f"{path.name}: {error}"
    return ""


def _reason(error: BaseException, place: str | Path) -> str:
    """What a library says, without its advice to run foreign code."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, TypeError | AttributeError | KeyError | IndexError):
        return _no_mapping(place) or f"one of its files holds something else than it should ({error})"
    if ADVICE in str(error):
        return "it needs Python code that comes with it, and altup runs none"
    return str(error).strip() or type(error).__name__
