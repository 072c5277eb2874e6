"""`altup params`: parameters, FLOPs and activation memory, from the configuration alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.cli.options import option, with_settings
from altup.core.errors import UserError
from altup.training.pretraining import MODEL_NAMES, PretrainConfig

if TYPE_CHECKING:
    from altup.models.accounting import Accounting


HOW_TO_TRAIN = ("optimizer", "precision", "activation_checkpointing")


@with_settings(PretrainConfig, only=(*MODEL_NAMES, *HOW_TO_TRAIN))
def command(
    model: Annotated[
        str | None,
        option("--model", "t5 (default), bert, decoder; or a run, a folder or a hub name of any model.", "Model"),
    ] = None,
    config: Annotated[
        Path | None,
        option("--config", "A run or model folder, its config.json, or a YAML file. Flags win over it.", "Model"),
    ] = None,
    vocab_size: Annotated[int | None, option("--vocab-size", "Rows of the embedding tables.", "Model")] = None,
    inputs: Annotated[
        int,
        typer.Option("--inputs-length", "--inputs", "--length", help="Tokens that the model reads of a sequence."),
    ] = 512,
    targets: Annotated[
        int | None,
        typer.Option(
            "--targets-length", "--targets", help="T5's decoder tokens [114] or BERT's masked ones [15 %]."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", "--batch", help="Sequences of a step on one GPU.", rich_help_panel="Training"
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        option(
            "--gpu",
            "Memory of a GPU, 24GB: does a step of altup pretrain fit, and with which settings?",
            "Training",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **settings: Any,
) -> None:
    """Count parameters, FLOPs and memory of a model; without one, the paper's tables beside altup's counts.

    With --batch-size or --gpu also the memory of a step of `altup pretrain`.
    """
    from altup.models.accounting import account

    training = {name: settings.pop(name) for name in HOW_TO_TRAIN if name in settings}
    if batch_size is not None:
        training["batch_size"] = batch_size
    if vocab_size is not None:
        settings["vocab_size"] = vocab_size
    if config is None and model is None and not settings and not training and gpu is None:
        rows = paper_rows(inputs, targets)
        if as_json:
            typer.echo(json.dumps({"inputs": inputs, "targets": rows[0]["targets"], "rows": rows}))
        else:
            _print_paper(rows, inputs)
        return
    model_of = _config_of(config, model, settings)
    if targets is not None and _objective(model_of) == "causal":
        raise UserError(f"--targets-length {targets}: a decoder answers for all of its inputs; remove it")
    result = account(model_of, inputs, targets)
    memory = _memory(result, gpu, **training) if training or gpu else {}
    if as_json:
        typer.echo(json.dumps({**result.to_json(), **memory}))
        return
    _print_one(result)
    if memory:
        _print_memory(memory, gpu)


def _config_of(file: Path | None, model: str | None, settings: dict[str, Any]) -> Any:
    """Of a family's model by names, of a saved one of altup with settings laid over it, or of transformers."""
    from altup.core.pretrained import load_config
    from altup.core.runs import find_model
    from altup.models.config import AltUpConfig
    from altup.models.families import FAMILIES
    from altup.training.model_config import find_model_config

    if model is None or model in FAMILIES:
        return find_model_config(file, model, **settings)
    if file is not None:
        raise UserError(f"--model {model} and --config {file} both name a model; give one")
    place = find_model(model)
    config = load_config(place)
    if isinstance(config, AltUpConfig) and Path(place).exists():
        return find_model_config(Path(place), **settings)
    if settings:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise UserError(f"{names}: the model of {model!r} is described by its own config; remove them")
    return config


def _memory(
    cost: Accounting,
    gpu: str | None,
    batch_size: int = PretrainConfig.batch_size,
    optimizer: str = "muon",
    precision: str = "bf16",
    activation_checkpointing: bool = False,
) -> dict[str, Any]:
    """Bytes of a step; with the size of a GPU whether it fits, and options under which it would."""
    from altup.core.errors import check_choice, check_whole
    from altup.core.hardware import TRAINING_PRECISIONS
    from altup.training.step_memory import STATE_BYTES, Plan, gpu_bytes, settings_that_fit, step_memory

    check_whole("batch_size", batch_size, 1)
    check_choice("optimizer", optimizer, STATE_BYTES)
    check_choice("precision", precision, TRAINING_PRECISIONS)
    plan = Plan(batch_size, optimizer, precision, activation_checkpointing)
    needed = step_memory(cost, plan)
    found: dict[str, Any] = {"step": asdict(plan), "step_bytes": asdict(needed), "step_total": needed.total}
    if gpu is not None:
        room = gpu_bytes(gpu)
        found["fits"] = needed.fits(room)
        found["settings"] = [] if found["fits"] else settings_that_fit(cost, batch_size, plan, room)
    return found


def paper_rows(inputs: int, targets: int | None = None) -> list[dict[str, Any]]:
    """Every row of the paper's parameter tables with our counts, and costs relative to the dense model.

    The paper's time is the inverse of its training speed.
    """
    from altup.models.accounting import account
    from altup.models.t5.config import AltUpT5Config
    from altup.studies.paper import table

    rows = []
    dense: dict[str, tuple[int, float]] = {}
    for paper in table("parameters_and_speed"):
        model, method, k = str(paper["model"]), str(paper["method"]), int(paper["k"])
        counted = account(AltUpT5Config.from_preset(model, method, k), inputs, targets)
        speed = float(paper["train_speed_examples_per_s_per_core"])
        if method == "dense":
            dense[model] = counted.flops_train, speed
        dense_flops, dense_speed = dense[model]
        rows.append(
            {
                "model": model,
                "method": method,
                "k": k,
                "pretrain_steps": paper["pretrain_steps"],
                "paper_embedding": float(paper["embedding_params"]),
                "paper_non_embedding": float(paper["non_embedding_params"]),
                **{name: value for name, value in counted.to_json().items() if isinstance(value, int)},
                "flops_to_dense": counted.flops_train / dense_flops,
                "paper_time_to_dense": dense_speed / speed,
            }
        )
    return rows


def _print_paper(rows: list[dict[str, Any]], inputs: int) -> None:
    from rich import box
    from rich.table import Table

    from altup.core.terminal import Console

    title = "The paper's parameter tables and our counts"
    view = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("\nmodel", no_wrap=True)
    for name in ("embedding\npaper", "\nours", "non-emb.\npaper", "\nours", "\nFLOPs", "paper's\ntime"):
        view.add_column(name, justify="right", no_wrap=True)
    notes: list[str] = []
    steps = None
    for row in rows:
        if steps not in (None, row["pretrain_steps"]):
            view.add_section()
        steps = row["pretrain_steps"]
        name = f"{row['model']} {row['method']}" + (f" {row['k']}" if row["k"] > 1 else "")
        cells = []
        for part in ("embedding", "non_embedding"):
            paper, counted = _digits(row[f"paper_{part}"], 2), _digits(row[part], 2)
            if counted != paper:
                counted = _digits(row[part], 3) + "*"
                notes.append(f"* {name}: {row[part]:,} by our count, where the paper prints {paper}.")
            cells += [paper, counted]
        view.add_row(name, *cells, f"{row['flops_to_dense']:.3f}", f"{row['paper_time_to_dense']:.2f}")
    console = Console(highlight=False)
    console.print(view)
    for note in notes:
        console.print(note)
    console.print(
        f"FLOPs for {inputs} + {rows[0]['targets']} tokens and the paper's time (on TPUs) are relative to dense.\n"
        "One model in detail: altup params --size base --method altup --k 2"
    )


def _print_memory(memory: dict[str, Any], gpu: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    step = memory["step"]
    view = Table("one step of altup pretrain, GiB", "", min_width=52)
    view.columns[1].justify = "right"
    for part, number in memory["step_bytes"].items():
        view.add_row(part.replace("_", " "), f"{number / 2**30:,.1f}")
    view.add_section()
    view.add_row("total", f"{memory['step_total'] / 2**30:,.1f}", style="bold")
    console = Console(highlight=False)
    console.print(view)
    again = ", layers recomputed" if step["activation_checkpointing"] else ""
    console.print(
        f"{step['rows']} sequences at once, {step['optimizer']}, {step['precision']}{again}. An estimate."
    )
    if gpu is None:
        return
    if memory["fits"]:
        console.print(f"It fits a GPU of {gpu}, 1 GiB of which is kept for CUDA.", style="bold green")
    elif memory["settings"]:
        console.print(f"It does not fit a GPU of {gpu}, 1 GiB of which is kept for CUDA. With these it would:")
        for options in memory["settings"]:
            console.print(f"  {options}", style="bold", soft_wrap=True)
    else:
        console.print(f"It does not fit, not even on 64 GPUs of {gpu}.", style="bold red")


def _digits(number: float, places: int) -> str:
    """3.29e7 rather than 3.29e+07: the paper's digits in few columns."""
    return f"{number:.{places}e}".replace("e+0", "e")


def _print_one(result: Accounting) -> None:
    from rich.table import Table

    from altup.core.terminal import Console

    config = result.config
    if result.activation_bytes_paper is None:
        title = f"{type(config).__name__}: {config.model_type} of transformers"
    else:
        title = _title(config)
    console = Console(highlight=False)
    console.print(title, style="bold")
    sections = (
        ("parameters", result.parameters, result.total, "{:,.0f}", 1),
        ("GFLOPs forward", result.flops, result.flops_forward, "{:,.3f}", 1e9),
        ("activations, MiB", result.activations, result.activation_bytes, "{:,.2f}", 2**20),
    )
    for head, parts, total, form, unit in sections:
        view = Table(head, "", "share", min_width=52)
        view.columns[1].justify = view.columns[2].justify = "right"
        for part, number in parts.items():
            if number:
                view.add_row(part.replace("_", " "), form.format(number / unit), f"{number / total:.1%}")
        view.add_section()
        if head == "parameters":
            for part, number in (("embedding", result.embedding), ("non-embedding", result.non_embedding)):
                view.add_row(part, form.format(number / unit), f"{number / total:.1%}")
        view.add_row("total", form.format(total / unit), "", style="bold")
        console.print(view)
    text = (
        f"One sequence of {_tokens(result)}, 2 FLOPs a multiply-add, activations in "
        f"bfloat16.\nTraining: {result.flops_train / 1e9:,.1f} GFLOPs (3 × forward)."
    )
    if result.activation_bytes_paper is not None:
        text += f" Activations by the paper's formula: {result.activation_bytes_paper / 2**20:,.2f} MiB."
    console.print(text)


def _title(config: Any) -> str:
    rule = f"{config.widening}, K = {config.num_blocks}" if config.widening_method.has_blocks else "not widened"
    layers = " + ".join(
        str(getattr(config, name)) for name in ("num_layers", "num_decoder_layers") if hasattr(config, name)
    )
    return (
        f"d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads of {config.d_kv}, "
        f"{layers} layers, vocabulary {config.vocab_size}; {rule}"
    )


def _objective(config: Any) -> str | None:
    from altup.models.families import family_of

    found = family_of(config)
    return found.objective if found else None


def _tokens(result: Accounting) -> str:
    if result.config.is_encoder_decoder:
        return f"{result.inputs} + {result.targets} tokens"
    masked = f", {result.targets} of them masked" if _objective(result.config) == "masked" else ""
    return f"{result.inputs} tokens{masked}"
