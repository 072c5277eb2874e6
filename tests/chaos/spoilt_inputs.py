"""The fuzzer's cases, continued: configs, folders and files of every kind, spoilt. Each gives the command, what is
wrong in words, and whether it is certain to be bad."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.chaos import spoil
from tests.chaos.cases import COMMANDS, OUT, fill, outside
from tests.chaos.material import TINY

Made = tuple[list[str], str, bool]
GIVEN = ("trackers",)  # by a flag, which wins
RESUME = ["pretrain", "--out", "run", "--resume"]
MODELS = ("t5", "decoder", "hf", "llama", "widened")
MODEL_READERS = (
    "generate",
    "evaluate",
    "finetune",
    "pretrain from",
    "upcycle",
    "params config",
    "generate decoder",
    "widen",
    "narrow",
)
# Fields of a model's config with values that no model has.
IMPOSSIBLE: list[dict[str, Any]] = [
    *({name: value} for name in ("d_model", "num_layers", "num_heads", "vocab_size", "d_kv", "d_ff")
      for value in (0, -1, "x", [], {}, 1.5, 10**12)),
    {"model_type": "nobody"}, {"model_type": None}, {"model_type": []}, {"num_layers": 10**9}, {"d_model": 10**30},
]  # fmt: skip
OF_LLAMA: list[dict[str, Any]] = [
    *({name: value} for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
      for value in (-1, "x", [], {}, 10**12)),
    {"model_type": "nobody"}, {"model_type": None}, {"model_type": []},
]  # fmt: skip
OF_OURS: list[dict[str, Any]] = [
    {"widening": "sideways"}, {"num_blocks": 0}, {"num_blocks": 10**9}, {"num_blocks": "two"}, {"selection": "x"},
    {"widening": None}, {"sequence": "x"}, {"stride": 0}, {"experts": -1}, {"num_blocks": []},
]  # fmt: skip


def take_command(draw: random.Random, box: Path, material: Path, names: tuple[str, ...]) -> tuple[str, list[str]]:
    name = draw.choice(names)
    fill(box, material, COMMANDS[name])
    return name, COMMANDS[name]


def bad_yaml(draw: random.Random, box: Path, material: Path) -> Made:
    files = {
        "pretrain config": "pretrain.yaml", "finetune config": "finetune.yaml", "study run": "study.yaml",
        "study run scale": "scale.yaml", "params config": "params.yaml", "resume": "run/config.yaml",
    }  # fmt: skip
    kind = draw.choice(list(files))
    words = {
        "study run scale": COMMANDS["study run"],
        "params config": ["params", "--config", "params.yaml"],
        "resume": RESUME,
    }
    arguments = words.get(kind) or COMMANDS[kind]
    fill(box, material, [*arguments, "run"] if kind == "resume" else arguments)
    path = box / files[kind]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    broken = draw.choice(
        (spoil.broken_yaml, spoil.broken_yaml, spoil.noise, spoil.folder_instead, spoil.pipe_instead)
    )
    return arguments, f"{kind}: {broken(draw, path)}", True


def bad_setting(draw: random.Random, box: Path, material: Path) -> Made:
    """One setting of a config.yaml is of another kind, or out of range."""
    from altup.core.schema import describe_settings, fits
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    name, kind = draw.choice([("pretrain config", PretrainConfig), ("finetune config", FinetuneConfig)])
    fill(box, material, COMMANDS[name])
    one = draw.choice([one for one in describe_settings(kind).values() if one.panel and one.name not in GIVEN])
    wrong = [
        value
        for value in spoil.WRONG
        if not fits(value, one.kind) and not (isinstance(value, int | str) and "float" in str(one.kind))
    ]
    value = draw.choice([*wrong, *(v for v in outside(one) if v != "")])
    path = box / name.replace(" config", ".yaml")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), one.name: value}))
    return COMMANDS[name], f"{path.name}: {one.name}={str(value)[:40]!r}", True


def bad_tree(draw: random.Random, box: Path, material: Path) -> Made:
    """A value anywhere in a study's or a scale's YAML is of another kind."""
    arguments = COMMANDS["study run"]
    fill(box, material, arguments)
    path = box / draw.choice(("study.yaml", "scale.yaml"))
    content = yaml.safe_load(path.read_text())
    where, holder, key = draw.choice(spoil.places(content, ""))
    holder[key] = draw.choice(spoil.WRONG)
    path.write_text(yaml.safe_dump(content))
    return arguments, f"{path.name}: {where}={str(holder[key])[:40]!r}", False


def bad_model(draw: random.Random, box: Path, material: Path) -> Made:
    name, arguments = take_command(draw, box, material, MODEL_READERS)
    model = box / next(word for word in arguments if word in MODELS)
    config, weights, tokenizer = model / "config.json", model / "model.safetensors", model / "tokenizer.json"
    kinds = ["config", "impossible", "impossible"]
    if name != "params config":
        kinds += ["weights", "weights", "weights file"]
    if name not in ("params config", "upcycle", "widen", "narrow"):
        kinds += ["tokenizer", "pickle"]
    kind = draw.choice(kinds)
    if kind == "config":
        about = draw.choice((*spoil.UNREADABLE, spoil.other_json, spoil.delete))(draw, config)
    elif kind == "impossible":
        shape = IMPOSSIBLE if model.name in ("t5", "decoder", "hf") else OF_LLAMA
        values = draw.choice([*shape, *(OF_OURS if model.name in ("t5", "decoder") else [])])
        about = spoil.set_values(config, **values)
    elif kind == "weights":
        about = spoil.bad_safetensors(draw, weights)
    elif kind == "weights file":
        about = draw.choice((*spoil.UNREADABLE, spoil.delete))(draw, weights)
    elif kind == "pickle":
        weights.rename(model / "pytorch_model.bin")
        about = "weights are called pytorch_model.bin"
    else:
        about = draw.choice((*spoil.UNREADABLE, spoil.other_json))(draw, tokenizer)
    return arguments, f"{name}: {about}", True


def odd_model(draw: random.Random, box: Path, material: Path) -> Made:
    """Some value or byte of a model folder, which may matter or not."""
    name, arguments = take_command(draw, box, material, MODEL_READERS)
    model = box / next(word for word in arguments if word in MODELS)
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    change = draw.choice((spoil.wrong_value, spoil.wrong_value, spoil.flip))
    return arguments, f"{name}: {change(draw, model / draw.choice(files))}", False


def bad_data(draw: random.Random, box: Path, material: Path) -> Made:
    arguments = COMMANDS[draw.choice(("pretrain", "pretrain from"))]
    fill(box, material, arguments)
    data = box / "data"
    kind = draw.choice(("manifest", "shard", "tokenizer", "value"))
    if kind == "manifest":
        return (
            arguments,
            draw.choice((*spoil.UNREADABLE, spoil.other_json, spoil.delete))(draw, data / "manifest.json"),
            True,
        )
    if kind == "shard":
        path = data / draw.choice(("train-00000.bin", "validation-00000.bin"))
        return arguments, draw.choice((*spoil.UNREADABLE, spoil.delete, spoil.flip))(draw, path), True
    if kind == "tokenizer":
        path = data / "tokenizer" / "tokenizer.json"
        return arguments, draw.choice((*spoil.UNREADABLE, spoil.other_json, spoil.delete))(draw, path), True
    return arguments, spoil.wrong_value(draw, data / "manifest.json"), False


def bad_run(draw: random.Random, box: Path, material: Path) -> Made:
    """A run that stopped after its first step, with nothing whole to go on from; or a record that is odd."""
    fill(box, material, ["run"])
    run = box / "run"
    for name in ("final", "checkpoints/step-2"):
        shutil.rmtree(run / name)
    checkpoint = run / "checkpoints" / "step-1"
    if draw.random() < 0.3:
        change = draw.choice((spoil.flip, spoil.truncate, spoil.noise, spoil.pipe_instead, spoil.folder_instead))
        return RESUME, change(draw, run / "metrics.jsonl"), False
    files = ("config.json", "model.safetensors", "optimizer.safetensors", "training_state.json", "SHA256SUMS.json")
    change = draw.choice((*spoil.UNREADABLE, spoil.delete, spoil.flip))
    return RESUME, change(draw, checkpoint / draw.choice(files)), True


def bad_text(draw: random.Random, box: Path, material: Path) -> Made:
    """A source of `prepare`, which must stop at it."""
    fill(box, material, ["text"])
    name = draw.choice(("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"))
    path = box / "text" / name
    arguments = ["prepare", f"text/{name}", *COMMANDS["prepare"][2:], "--on-error", "stop"]
    if name == "a.jsonl" and draw.random() < 0.7:
        line = draw.choice(
            (
                "{",
                "[]",
                "3",
                '{"text": 3}',
                '{"text": null}',
                "{}",
                '{"text": ["a"]}',
                "\x00",
                "[" * 9000,
                '{"text": "\\ud800"}',
            )
        )
        lines = path.read_text().splitlines()
        lines[draw.randrange(len(lines))] = line
        path.write_text("\n".join(lines))
        return arguments, f"a line {line[:20]!r}", True
    if name == "a.txt":
        path.write_bytes(path.read_bytes() + b"\n\n\xff\xfe\xfa")
        return arguments, "bytes that are no UTF-8", True
    if draw.random() < 0.2:
        return [*arguments, "--field", "body"], "no such field", name != "a.txt"
    if name == "a.jsonl":
        return (
            arguments,
            draw.choice((spoil.noise, spoil.empty, spoil.pipe_instead, spoil.folder_instead))(draw, path),
            True,
        )
    return arguments, draw.choice((spoil.truncate, spoil.noise, spoil.empty, spoil.pipe_instead))(draw, path), True


def bad_task_file(draw: random.Random, box: Path, material: Path) -> Made:
    name, arguments = take_command(draw, box, material, ("finetune", "evaluate"))
    path = box / "tasks" / "glue" / "cola" / ("train.jsonl" if name == "finetune" else "validation.jsonl")
    kind = draw.choice(("file", "line", "line", "bomb"))
    if kind == "file":
        return (
            arguments,
            draw.choice((spoil.noise, spoil.empty, spoil.delete, spoil.pipe_instead, spoil.loop_instead))(
                draw, path
            ),
            True,
        )
    if kind == "bomb":
        path.unlink()
        return arguments, spoil.bomb(draw, path.with_name(path.name + ".gz")), True
    line = draw.choice((
        "{", "[]", "3", "{}", '{"sentence": null, "label": 0}', '{"sentence": 3, "label": 0}',
        '{"sentence": "a"}', "[" * 9000,
        '{"sentence": "a", "label": 7}', '{"sentence": "a", "label": null}', '{"sentence": "a", "label": "yes"}',
        "\x00",
        '{"sentence": "a", "label": [0]}', '{"sentence": "a", "label": 1e400}', '{"sentence": "a", "label": -1}',
    ))  # fmt: skip
    lines = path.read_text().splitlines()
    lines[draw.randrange(len(lines))] = line
    path.write_text("\n".join(lines))
    return arguments, f"{path.name}: a line {line[:40]!r}", True


def bad_own_task(draw: random.Random, box: Path, material: Path) -> Made:
    """A task of the user's own, as a .jsonl file or a Python file."""
    fill(box, material, ["t5"])
    if draw.random() < 0.5:
        code = draw.choice((
            "raise RuntimeError('no')", "import nothing_at_all", "x = ", "task = 3", "", "TASK = 3", "def f(:",
            "1/0", "\x00",
            "from altup.data.tasks import Task\ntask = Task()", "raise ValueError",
        ))  # fmt: skip
        (box / "own.py").write_text(code)
        name, about = "own.py", f"own.py: {code[:40]!r}"
    else:
        line = draw.choice(
            ('{"input": 3, "target": "a"}', '{"input": "a"}', "{}", "[]", '{"target": "b"}', "", "noise")
        )
        (box / "own.jsonl").write_text(line)
        name, about = "own.jsonl", f"own.jsonl: {line!r}"
    verb = draw.choice((["finetune", "t5", *COMMANDS["finetune"][6:]], ["evaluate", "t5", "--out", OUT]))
    return [*verb, "--task", name], about, True


def bad_prompt(draw: random.Random, box: Path, material: Path) -> Made:
    """Too much, too little, or nothing to answer."""
    name, arguments = take_command(draw, box, material, ("generate", "generate decoder"))
    at = arguments.index("--prompt")
    prompt = draw.choice(
        (
            "",
            " ",
            "\udcff",
            "a " * 30_000,
            "<extra_id_99>" * 3000,
            "\x1b",
            "\n",
            "💥" * 1000,
            "<extra_id_1> <extra_id_0>",
        )
    )
    return [*arguments[: at + 1], prompt, *arguments[at + 2 :]], f"{name}: prompt {prompt[:30]!r}", False


def too_large(draw: random.Random, box: Path, material: Path) -> Made:
    """A model or a batch beyond any memory."""
    fill(box, material, ["data"])
    values = draw.choice((
        ["d_model=200000", "d_ff=200000"], ["num_layers=10001"], ["num_layers=9999", "d_model=4096"],
        ["d_ff=10000000000"],
        ["vocab_size=10000000000"], ["num_heads=100000000"], ["d_kv=1000000000"],
        ["num_decoder_layers=1000000000"],
        ["relative_attention_num_buckets=1000000000000"],
    ))  # fmt: skip
    words = [word for one in values for word in ("--set", one)]
    command = draw.choice(
        (
            ["pretrain", "--data", "data", "--out", OUT, *TINY],
            ["pretrain", "--data", "data", "--out", OUT, *TINY, "--method", "altup", "--k", "2"],
        )
    )
    return [*command, *words], f"too large: {values}", True
