"""What `import altup` changes in transformers: a folder of a widened model is loaded wide, and its card says how.

Transformers chooses a model's class by the type of its config, and a widened Llama is a Llama in its config. So
`PreTrainedModel.from_pretrained`, through which Auto classes, pipelines and PEFT go too, is told what it loads.
Models that were not widened are loaded as ever, and neither transformers nor torch is imported here.

Without altup a widened model must not be loaded as a narrow one. So its saved config has text in place of sizes,
which every class of transformers refuses; with altup it is read as the number.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from altup.core.errors import UserError

MODELS, CONFIGS = "transformers.modeling_utils", "transformers.configuration_utils"
SIZES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "vocab_size")  # one of which every model has
NOTE = ": widened by altup, which reads this as the number; import altup before you load the model"
OF_LOADING = ("dtype", "torch_dtype", "quantization_config")  # options that are fields of a config as well


class WidenedError(Exception):
    """A plain class is about to load the weights of a widened model."""

    def __init__(self, config: Any) -> None:
        super().__init__("these are the weights of a widened model; load them with altup.load_widened")
        self.config = config


def install() -> None:
    """Now, or as soon as transformers is imported."""
    for name, change in ((MODELS, _change), (CONFIGS, _change_configs)):
        if module := sys.modules.get(name):
            change(module)
        else:
            sys.meta_path.insert(0, AfterImport(name, change))


class AfterImport(MetaPathFinder):
    """On `sys.meta_path`: calls a function with the module `name` once it is there."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((s for finder in others if (s := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: Any) -> None:
                run(module)
                self.function(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _change(module: Any) -> None:
    cls = module.PreTrainedModel
    if getattr(cls.from_pretrained, "knows_altup", False):
        return
    load: Any = cls.from_pretrained.__func__
    fill, save, upload = cls._load_pretrained_model, cls.save_pretrained, cls._upload_modified_files

    @functools.wraps(load)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:
        try:
            return load(cls, pretrained_model_name_or_path, *args, **options)
        except WidenedError as found:
            config = found.config
        return _load_wide(cls, pretrained_model_name_or_path, config, args, options)

    @functools.wraps(fill)
    def _load_pretrained_model(model: Any, *args: Any, **options: Any) -> Any:
        if is_widened(model.config) and not _widening("widen").is_wide(model):
            raise WidenedError(model.config)
        return fill(model, *args, **options)

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        saved = save(self, save_directory, *args, **options)
        if is_widened(self.config) and options.get("is_main_process", True) and Path(save_directory).is_dir():
            _write_card(self, save_directory)
        return saved

    @functools.wraps(upload)
    def _upload_modified_files(self: Any, working_dir: Any, repo_id: str, *args: Any, **options: Any) -> Any:
        if is_widened(getattr(self, "config", None)):
            _write_card(self, working_dir, repo_id)
        return upload(self, working_dir, repo_id, *args, **options)

    from_pretrained.knows_altup = True  # type: ignore[attr-defined]
    cls.from_pretrained = classmethod(from_pretrained)
    cls.save_pretrained = save_pretrained
    cls._load_pretrained_model = staticmethod(_load_pretrained_model)
    cls._upload_modified_files = _upload_modified_files


def _change_configs(module: Any) -> None:
    cls = module.PreTrainedConfig
    if getattr(cls.to_json_file, "knows_altup", False):
        return
    write, read = cls.to_json_file, cls._dict_from_json_file.__func__

    @functools.wraps(write)
    def to_json_file(self: Any, json_file_path: Any, *args: Any, **options: Any) -> None:
        write(self, json_file_path, *args, **options)
        if is_widened(self):
            path = Path(json_file_path)
            fields = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(_with_notes(fields), indent=2) + "\n", encoding="utf-8")

    @functools.wraps(read)
    def _dict_from_json_file(cls: Any, json_file: Any) -> Any:
        return _without_notes(read(cls, json_file))

    to_json_file.knows_altup = True  # type: ignore[attr-defined]
    cls.to_json_file = to_json_file
    cls._dict_from_json_file = classmethod(_dict_from_json_file)


def _with_notes(fields: Any) -> Any:
    """Sizes as text, in parts of a config too: `"hidden_size": "64: widened by altup…"`."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: f"{value}{NOTE}" if name in SIZES and type(value) is int else _with_notes(value)
        for name, value in fields.items()
    }


def _without_notes(fields: Any) -> Any:
    if isinstance(fields, dict):
        return {name: _without_notes(value) for name, value in fields.items()}
    is_noted = isinstance(fields, str) and fields.endswith(NOTE)
    return int(fields.removesuffix(NOTE)) if is_noted else fields


def is_widened(config: Any) -> bool:
    """Whether a config is that of a model which `altup.widen` has widened, and `load_widened` alone reads."""
    return isinstance(getattr(config, "altup", None), dict)


def _load_wide(cls: Any, place: Any, config: Any, args: tuple, options: dict[str, Any]) -> Any:
    if args or options.get("output_loading_info") or str(place) != str(config.name_or_path):
        raise UserError(
            f"{str(config.name_or_path)!r} holds a widened model, which is not loaded with output_loading_info, "
            "arguments of its class, or adapters of another folder; use altup.load_widened, and then load_adapter"
        )
    given = options.pop("config", None)
    if given is None or isinstance(given, str | Path):  # the other options were taken for fields of the config
        fields = config.to_dict().keys() - set(OF_LOADING)
        options = {name: value for name, value in options.items() if name not in fields}
    return _widening("loading").load_widened(place, cls, config=config, **options)


def _write_card(model: Any, folder: Any, name: str = "") -> None:
    _widening("card").write_card(model, Path(folder), name)


def _widening(name: str) -> Any:
    """A module of `altup.models.widening`: by name, because `import altup` imports this one and not those."""
    return importlib.import_module(f"altup.models.widening.{name}")
