"""The fuzzer's cases, continued: files made with intent, and what was changed and sealed again."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from altup.core.sealed_folders import MANIFEST, read_sealed_json, seal, write_sealed_json
from tests.chaos.cases import COMMANDS, fill
from tests.chaos.spoilt_inputs import MODELS, RESUME, Made, take_command

Change = Callable[[dict[str, Any]], object]
READERS = ("generate", "generate decoder", "evaluate", "finetune", "upcycle", "widen", "pretrain from")
TERMINAL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
NORMALIZERS: list[Any] = [
    {"type": "Sequence", "normalizers": [GROWS] * 8},
    {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"},
    {"type": "Prepend", "prepend": "a" * 10**6},
]
ROLES: list[Change] = [
    lambda vocabulary: vocabulary["sentinels"].reverse(),
    lambda vocabulary: vocabulary.update(eos=7),
    lambda vocabulary: vocabulary["sentinels"].__setitem__(0, vocabulary["eos"]),
    lambda vocabulary: vocabulary["sentinels"].pop(),
    lambda vocabulary: vocabulary["sentinels"].__setitem__(0, 10**6),
    lambda vocabulary: vocabulary.update(sha256="0" * 64),
    lambda vocabulary: vocabulary.update(size=10**9),
]
STATES: list[Any] = [{}, [], {"step": 7}, {"step": "1"}, {"meter": {}}, {"config": None}, {"evaluation": [1]}]
NO_CONFIG: list[dict[str, Any]] = [
    *({"bos_token_id": value} for value in (2**63, "x", 1.5)),
    *({"dtype": value} for value in ("evil", 3, [])),
    {"id2label": {"a": "b"}},
]


def _edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def bad_tokenizer(draw: random.Random, box: Path, material: Path) -> Made:
    """One that hangs, fills the memory or panics, or that belongs to a larger model."""
    name, arguments = take_command(draw, box, material, ("generate", "generate decoder", "evaluate", "finetune"))
    model = box / next(word for word in arguments if word in MODELS)
    kind = draw.choice(("normalizer", "added", "larger"))
    if kind == "normalizer":
        normalizer = draw.choice(NORMALIZERS[:2])
        _edit(model / "tokenizer.json", lambda content: content.update(normalizer=normalizer))
        return arguments, f"{name}: normalizer {str(normalizer)[:60]}", True
    if kind == "added":
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
        many = [{"id": 10**5 + i, "content": f"<t{i}>", **flags} for i in range(200_000)]
        _edit(model / "tokenizer.json", lambda content: content.update(added_tokens=many))
        return arguments, f"{name}: 200,000 added tokens", True
    words = [[f"word{i}", -9.0] for i in range(20_000)]
    _edit(model / "tokenizer.json", lambda content: content["model"]["vocab"].extend(words))
    return arguments, f"{name}: a tokenizer larger than the table", True


def bad_roles(draw: random.Random, box: Path, material: Path) -> Made:
    """A manifest that says something else of tokens than the tokenizer, sealed again or not."""
    arguments = COMMANDS["pretrain"]
    fill(box, material, arguments)
    path, number = box / "data/manifest.json", draw.randrange(len(ROLES))
    if draw.random() < 0.5:
        _edit(path, lambda content: ROLES[number](content["vocabulary"]))
        return arguments, f"role {number} changed", True
    content = read_sealed_json(path)
    ROLES[number](content["vocabulary"])
    write_sealed_json(path, content)
    return arguments, f"role {number} changed and sealed", True


def bad_numbers(draw: random.Random, box: Path, material: Path) -> Made:
    """Weights of another kind, or that are not finite."""
    name, arguments = take_command(draw, box, material, ("upcycle", "widen"))
    model = box / next(word for word in arguments if word in MODELS)
    weights = load_file(model / "model.safetensors")
    chosen = draw.choice([one for one, tensor in weights.items() if tensor.dim() == 2])
    change = draw.choice(("kind", "nan", "inf"))
    if change == "kind":
        weights[chosen] = weights[chosen].to(draw.choice((torch.int64, torch.bool, torch.complex64)))
    else:
        weights[chosen].view(-1)[0] = float(change)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return arguments, f"{name}: {chosen} {change}", True


def bad_state(draw: random.Random, box: Path, material: Path) -> Made:
    """The state of the only checkpoint, changed and sealed again."""
    fill(box, material, ["run"])
    run = box / "run"
    for name in ("final", "checkpoints/step-2"):
        shutil.rmtree(run / name)
    checkpoint, change = run / "checkpoints/step-1", draw.choice(STATES)
    path = checkpoint / "training_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change} if change else change))
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint)
    return RESUME, f"training_state.json: {change}", change != {"config": None}


def bad_seal(draw: random.Random, box: Path, material: Path) -> Made:
    """A bit of a folder that is sealed."""
    fill(box, material, ["widened"])
    files = [path for path in (box / "widened").iterdir() if path.name != MANIFEST and path.stat().st_size]
    path = draw.choice(sorted(files))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return COMMANDS["narrow"], f"narrow: a bit of {path.name}", True


def bad_record(draw: random.Random, box: Path, material: Path) -> Made:
    """Lines of metrics.jsonl changed, doubled or moved: a run continues, and does not believe them."""
    fill(box, material, ["run"])
    path = box / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kind, number = draw.choice(("change", "double", "move")), draw.randrange(len(lines))
    if kind == "change":
        lines[number] = json.dumps({**json.loads(lines[number]), "loss": 0.001}) + "\n"
    elif kind == "double":
        lines.insert(number, lines[number])
    else:
        lines.insert(0, lines.pop(number))
    path.write_text("".join(lines))
    return RESUME, f"metrics.jsonl: {kind} line {number}", False


def bad_link(draw: random.Random, box: Path, material: Path) -> Made:
    """A model's place is a link that leads nowhere, or its index names nothing."""
    name, arguments = take_command(draw, box, material, READERS)
    model = box / next(word for word in arguments if word in MODELS)
    kind = draw.choice(("link", "index", "config"))
    if kind == "link":
        shutil.rmtree(model)
        model.symlink_to(box / "gone")
    elif kind == "index":
        (model / "model.safetensors").unlink()
        wrong = draw.choice(({}, {"a": 3}, {"a": "../x.safetensors"}, [], None))
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
        kind += f" {wrong}"
    else:
        change = draw.choice(NO_CONFIG)
        _edit(model / "config.json", lambda content: content.update(change))
        return arguments, f"{name}: {change}", "bos_token_id" in change
    return arguments, f"{name}: {kind}", True


def odd_text(draw: random.Random, box: Path, material: Path) -> Made:
    """Characters that a terminal would obey, where text is shown."""
    fill(box, material, ["t5", "study.yaml", "results", "scale.yaml", "data"])
    (box / "own.jsonl").write_text(json.dumps({"input": TERMINAL, "target": TERMINAL}) + "\n")
    arguments = draw.choice(
        (
            ["tasks", "show", "own.jsonl"],
            ["params", "--method", TERMINAL],
            ["tasks", "show", TERMINAL],
            ["generate", "t5", "--prompt", f"{TERMINAL} <extra_id_0>", "--max-new-tokens", "2"],
        )
    )
    return arguments, "control characters", False
