"""The fuzzer's bad command lines, for every verb."""

from __future__ import annotations

import importlib
import inspect
import random
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from typer.models import OptionInfo

from tests.chaos import spoil
from tests.chaos.material import TINY

OUT = "out"
_TINY = shlex.join(TINY)
# A command of every kind that works.
GOOD = {
    "params": "params --size tiny --method altup --k 2",
    "params config": "params --config t5",
    "prepare": "prepare text/a.txt --vocab-size 400 --workers 1 --out out --validation-fraction 0.1",
    "pretrain": f"pretrain --data data --out out --steps 1 {_TINY}",
    "pretrain config": "pretrain --config pretrain.yaml --out out --track none",
    "pretrain from": "pretrain --from hf --data data --out out --steps 1 --inputs-length 16 --batch-size 4 "
    "--track none",
    "generate": "generate t5 --prompt 'a <extra_id_0> b' --max-new-tokens 4",
    "generate decoder": "generate decoder --prompt 'a b' --max-new-tokens 4",
    "tasks list": "tasks list --data tasks",
    "tasks show": "tasks show cola --data tasks",
    "finetune": "finetune t5 --task cola --data tasks --out out --steps 1 --batch-size 4 --inputs-length 16 "
    "--targets-length 4 --track none",
    "finetune config": "finetune --config finetune.yaml --out out --track none",
    "evaluate": "evaluate t5 --task cola --data tasks --out out --targets-length 4",
    "upcycle": "upcycle hf --out out",
    "widen": "widen llama --out out",
    "narrow": "narrow widened --out out",
    "compare": "compare run run2 --out out/compare.html",
    "study list": "study list",
    "study run": "study run study.yaml --scale scale.yaml --data data --out out --no-speed --dry-run",
    "study report": "study report study.yaml --results results --out out/report.html --no-plots",
    "study table": "study table study.yaml --results results",
    "study merge": "study merge results --into out",
    "bench show": "bench --show bench.csv",
}
# Those that take too long to be seen to work.
SLOW = {
    "demo": "demo --out out --steps 1",
    "bench": "bench rule --quick --out out/rows.csv",
    "doctor": "doctor --quick",
}
COMMANDS = {name: shlex.split(words) for name, words in {**GOOD, **SLOW}.items()}
# Options with values that no machine can do, or that mean nothing; one mistake a line or between bars.
BAD_OPTIONS = {
    "params": """
        --k 0 | --k -1 | --k 1000000 | --inputs 0 | --inputs -1
        --targets 0 | --targets -1 | --method '' | --method +
        --method altupp | --method altup+altup | --method moe+ | --method altup+recycled | --size ''
        --size huge | --size TINY | --size 0 | --model gpt | --stride 0 | --experts -1 | --extra-layers -2
        --extra-layers 1000000000 | --method sequence-altup --stride -3
        --method moe --experts 1000000000000000""",
    "prepare": """
        --vocab-size 0 | --vocab-size -1 | --vocab-size 10 | --vocab-size 1000000000000000000000
        --workers 0 | --workers -1 | --workers 10000000 | --max-document-mb 0 | --max-document-mb -1
        --sample-mb 0 | --sample-mb -1 | --shard-tokens 0 | --shard-tokens -1 | --max-unpack-ratio 0
        --max-unpacked-mb -1 | --validation-fraction 1 | --validation-fraction nan
        --validation-fraction -0.1 | --validation-fraction inf | --validation-fraction 1e300
        --on-error maybe | --on-error '' | --validation nowhere | --validation text/a.txt
        --tokenizer nowhere | --tokenizer text/a.txt | --tokenizer noise | --tokenizer pipe | --part 0/3
        --part 4/3 | --part x | --part 1/0 | --part -1/2 | --part 1/100000000000 | --merge""",
    "pretrain": """
        --method altup --k 0 | --method altup --k -2 | --method altup --k 1000000
        --method altup --extra-layers -9 | --set d_model=0 | --set d_model=-8 | --set d_model=x
        --set d_model=1e9 | --set d_model=1000000 | --set d_model= | --set d_model=99999999999999999999
        --set num_layers=0 | --set num_layers=1000000000 | --set num_layers=true | --set num_heads=0
        --set num_heads=-1 | --set num_heads=2.5 | --set d_ff=null | --set d_ff=1000000000000 | --set d_ff
        --set d_kv=0 | --set d_kv=[1] | --set vocab_size=5 | --set nothing=1 | --set =1
        --set dropout_rate=7 | --set layer_norm_epsilon=x | --method altupp | --method '' | --method +
        --method altup+sum | --method moe --experts 0 | --method sequence-altup --stride 0 | --model gpt
        --size giant | --lr-factor nobody=2 | --lr-factor head=-1 | --lr-factor head=x | --lr-factor head
        --micro-batch 3 | --inputs-length 100000000000 | --inputs-length 1000000 | --track paper
        --data nowhere | --data hollow | --data noise | --data pipe | --data loop | --from nowhere
        --from hollow | --from t5 --method altup | --config nowhere | --config hollow | --config noise
        --config pipe | --config loop | --beta1 0.9 --optimizer adafactor | --resume --out noise
        --batch-size 1000000000000""",
    "generate": """
        --max-new-tokens 0 | --max-new-tokens -1 | --max-new-tokens 1000000000000 | --beams 0 | --beams -1
        --beams 100000 | --beams 1000000000000000000000 | --max-new-tokens 1000000000000000000000
        --temperature -1 | --temperature nan | --temperature inf | --temperature -inf
        --temperature 1e-300 | --seed -1 | --seed 1000000000000000000000""",
    "tasks show": "--count 0 | --count -4 | --split trane | --split '' | --data nowhere",
    "tasks list": "--data nowhere | --data noise | --data pipe",
    "finetune": """
        --task '' | --task colla | --task cola=0 | --task cola=-1 | --task cola=nan | --task cola=inf
        --task nowhere.jsonl | --task pipe | --task noise | --task hollow | --task = | --task cola=
        --suite glou | --data hollow | --data pipe | --data noise | --optimizer sgd | --micro-batch 3
        --weight-decay 0.1""",
    "evaluate": """
        --limit 0 | --limit -1 | --inputs-length 0 | --inputs-length 1000000000000 | --targets-length -1
        --targets-length 0 | --targets-length 1000000000000000000000 | --batch-size 0 | --batch-size -1
        --batch-size 10000000000000 | --precision fp8 | --on-error never | --split test | --task x
        --suite glou | --predict-only --split trane | --data hollow""",
    "upcycle": """
        --k 0 | --k -1 | --k 1000000 | --k 1000000000000000000000 | --method moe | --method '' | --seed -1
        --seed 1000000000000000000000 | --method dense --k 0""",
    "widen": """
        --k 0 | --k -1 | --k 1000000 | --k 1000000000000000000000 | --method moe | --method '' | --seed -1
        --seed 1000000000000000000000""",
    "study run": """
        --seeds '' | --seeds x | --seeds 0,,1 | --seeds -1 | --seeds 1.5 | --seeds 1000000000000000000000
        --seeds 0,0 | --jobs 0 | --jobs -2 | --time-limit -1
        --time-limit nan | --price -1 | --price nan | --set steps | --set steps=0 | --set steps=x
        --set =3 | --set nothing=3 | --set finetune.nothing=1 | --set k=3 | --set steps=[
        --set finetune.steps=-1 | --set lr=nan | --set batch_size=1e30 | --scale '' | --scale smok
        --scale nowhere.yaml | --scale noise | --scale pipe | --scale hollow | --only Nobody
        --data nowhere | --tasks nowhere | --device Abacus | --all""",
    "study report": "--results nowhere | --scale unknown | --results pipe",
    "study table": "--format latex | --results noise | --scale unknown",
    "study merge": "--into noise | --into noise/x",
    "bench": """
        --size giant | --repeat 0 | --repeat -1 | --time-limit 0 | --time-limit nan | --plot x.gif
        --json --csv | --only nobody | --out rows.txt | --out noise | --show nowhere.csv | --show noise
        --show pipe | --show text/a.jsonl""",
    "demo": "--steps 0 | --steps -1 | --seed -1 | --seed 1000000000000000000000",
}
# Where a file or a folder that does not do goes instead of a good one: the word of COMMANDS to replace.
NAMED = {
    "params config": "t5", "prepare": "text/a.txt", "pretrain": "data", "pretrain config": "pretrain.yaml",
    "pretrain from": "hf", "generate": "t5", "tasks show": "cola", "finetune": "t5", "evaluate": "t5",
    "finetune config": "finetune.yaml", "upcycle": "hf", "widen": "llama", "narrow": "widened", "compare": "run2",
    "study run": "study.yaml", "study report": "results",
    "study table": "results", "study merge": "results", "bench show": "bench.csv",
}  # fmt: skip


def fill(box: Path, material: Path, arguments: list[str]) -> None:
    """Copy what a command names into its folder."""
    wanted = {word.split("/")[0] for word in arguments}
    if "pretrain.yaml" in wanted:
        wanted.add("data")
    if "finetune.yaml" in wanted:
        wanted |= {"t5", "tasks"}
    for name in sorted(wanted & {"results", *(path.name for path in material.iterdir())}):
        source = material / "studies" / "results" if name == "results" else material / name
        if name in ("run", "run2"):
            _copy_run(source, box)
        elif source.is_dir():
            shutil.copytree(source, box / name)
        elif source.is_file():
            shutil.copy(source, box / name)


def _copy_run(source: Path, box: Path) -> None:
    """The run with the data's folder beside it."""
    shutil.copytree(source, box / source.name)
    shutil.copytree(source.parent / "data", box / "data", dirs_exist_ok=True)
    config = box / source.name / "config.yaml"
    config.write_text(config.read_text().replace(str(source.parent / "data"), "data"))


def replaced(arguments: list[str], old: str, new: str) -> list[str]:
    at = arguments.index(old)
    return [*arguments[:at], new, *arguments[at + 1 :]]


# --- command lines ---


@cache
def _options() -> dict[str, list[tuple[str, str]]]:
    """The options of every command by the type of their value: [("--steps", "int"), …]."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, words in COMMANDS.items():
        module = importlib.import_module(f"altup.cli.{words[0]}")
        verbs = (
            {one.name: one.callback for one in module.app.registered_commands} if hasattr(module, "app") else {}
        )
        function: Any = verbs[words[1]] if verbs else module.command
        found[name] = []
        for one in inspect.signature(function, eval_str=True).parameters.values():
            kind, told = one.annotation.__origin__, one.annotation.__metadata__[0]
            if isinstance(told, OptionInfo):
                given = [told.default] if isinstance(told.default, str) else [*(told.param_decls or ())]
                flag = next((flag for flag in given if flag.startswith("--")), f"--{one.name.replace('_', '-')}")
                found[name].append((flag.split("/")[0], str(kind)))
    return found


def bad_number(draw: random.Random) -> tuple[list[str], str]:
    """A value that is none, for any option that wants a number; or one for a flag, which wants none."""
    name = draw.choice([name for name, options in _options().items() if options])
    flag, kind = draw.choice(_options()[name])
    if "bool" in kind:
        return [*COMMANDS[name], f"{flag}=yes"], f"{flag} with a value"
    if "int" not in kind and "float" not in kind:
        return [*COMMANDS[name], flag], f"{flag} without a value"
    value = draw.choice(spoil.NOT_NUMBERS if "float" in kind else spoil.NOT_WHOLE)
    return [*COMMANDS[name], flag, value], f"{flag} {value[:20]!r}"


def bad_option(draw: random.Random) -> tuple[list[str], str]:
    mistakes = [
        (name, one)
        for name, text in BAD_OPTIONS.items()
        for line in text.strip().splitlines()
        for one in line.split("|")
    ]
    name, one = draw.choice(mistakes)
    return [*COMMANDS[name], *shlex.split(one)], f"{name}: {one.strip()}"


def bad_range(draw: random.Random) -> tuple[list[str], str]:
    """Just outside of what a setting allows."""
    from altup.core.schema import describe_settings
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    name, kind = draw.choice([("pretrain", PretrainConfig), ("finetune", FinetuneConfig)])
    settings = [one for one in describe_settings(kind).values() if one.panel and outside(one)]
    one = draw.choice(settings)
    value = draw.choice(outside(one))
    flag = one.flag or f"--{one.name.replace('_', '-')}"
    return [*COMMANDS[name], flag, str(value)], f"{flag} {value}"


def outside(one: Any) -> list[Any]:
    """Values that a setting refuses."""
    text = str(one.kind)
    if "dict" in text or "list" in text or "bool" in text:
        return []
    whole = "int" in text and "float" not in text
    step = 1 if whole else 1e-9
    found: list[Any] = [] if whole else ["nan", "inf", "-inf"]
    if not whole and "float" not in text:
        return ["nobody", ""] if one.choices else []
    found += [one.at_least - step, -(10**20)] if one.at_least is not None else []
    found += [one.at_most + step, 10**30] if one.at_most is not None else []
    found += [one.below] if one.below is not None else []
    found += [one.above] if one.above is not None else []
    return found


def bad_usage(draw: random.Random) -> tuple[list[str], str]:
    """Verbs and options that there are not, and words too many or too few."""
    name = draw.choice(list(COMMANDS))
    words = list(COMMANDS[name])
    kind = draw.choice(("unknown option", "unknown verb", "a word too many", "cut", "repeated verb", "odd option"))
    if kind == "unknown option":
        words.append("--" + "".join(draw.choices("abcdeghij", k=6)))
    elif kind == "odd option":
        words.append(draw.choice(("--=3", "---steps", "-Z", "--\udcff", "--" + "s" * 3000, "--sTeps=1")))
    elif kind == "unknown verb":
        words[0] = draw.choice(("prertain", "", "💥", "\udcff", "--", "pretrain ", "PARAMS"))
    elif kind == "repeated verb":
        words = [words[0] + words[0], *words[1:]]
    elif kind == "a word too many" and name not in (
        "prepare",
        "study report",
        "study table",
        "study run",
        "bench",
    ):
        words += ["surplus", "words"]
    else:
        words = ["pretrain", "--out"] if name != "prepare" else ["prepare", "--out", OUT]
    return words, f"{kind} of {name}"


def bad_name(draw: random.Random) -> tuple[list[str], str]:
    """A file or folder of the wrong kind, or none."""
    command = draw.choice(list(NAMED))
    name = draw.choice(spoil.NAMES)
    return replaced(COMMANDS[command], NAMED[command], name), f"{command}: {name[:30]!r} for {NAMED[command]}"


def bad_out(draw: random.Random) -> tuple[list[str], str]:
    """A place that cannot be written to, or that holds something else."""
    command = draw.choice([c for c in COMMANDS if OUT in COMMANDS[c] and c != "study run"])
    name = draw.choice(
        [
            "noise",
            "noise/x",
            "text",
            "loop",
            "loop/x",
            "pipe",
            "/dev/null",
            "/dev/null/x",
            "/proc/x",
            "x" * 300,
            "\udcff" * 200,
            "",
        ]
    )
    if name == "text" and command in ("study merge", "evaluate"):  # which add to a folder
        name = "noise"
    return replaced(COMMANDS[command], OUT, name), f"{command}: --out {name[:30]!r}"


COMMAND_LINES: list[Callable[[random.Random], tuple[list[str], str]]] = [
    bad_number, bad_option, bad_option, bad_range, bad_usage, bad_name, bad_name, bad_out,
]  # fmt: skip
