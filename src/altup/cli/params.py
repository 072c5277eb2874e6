"""`altup params`: parameters, FLOPs and activation memory, from the configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.cli.options import option, with_settings
from altup.core.errors import UserError
from altup.training.pretraining import MODEL_NAMES, PretrainConfig

if TYPE_CHECKING:
    from altup.models.accounting import Accounting


@with_settings(PretrainConfig, only=("model", *MODEL_NAMES))
def command(
    config: Annotated[
        Path | None,
        option("--config", "A run or model folder, its config.json, or a YAML file. Flags win over it.", "Model"),
    ] = None,
    inputs: Annotated[int, typer.Option("--inputs", help="Tokens that the model reads of a sequence.")] = 512,
    targets: Annotated[
        int | None,
        typer.Option("--targets", help="T5's decoder tokens [114] or BERT's masked ones [15 %]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **settings: Any,
) -> None:
    """Count parameters, FLOPs and activation memory; without a model, the paper's tables beside our counts."""
    from altup.models.accounting import account
    from altup.training.model_config import find_model_config

    if config is None and not settings:
        rows = paper_rows(inputs, targets)
        if as_json:
            typer.echo(json.dumps({"inputs": inputs, "targets": rows[0]["targets"], "rows": rows}))
        else:
            _print_paper(rows, inputs)
        return
    model_of = find_model_config(config, **settings)
    if targets is not None and model_of.model_type == "altup_decoder":
        raise UserError(f"--targets {targets}: a decoder answers for all of its inputs; leave it out")
    result = account(model_of, inputs, targets)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        _print_one(result)


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
        ours = account(AltUpT5Config.from_preset(model, method, k), inputs, targets)
        speed = float(paper["train_speed_examples_per_s_per_core"])
        if method == "dense":
            dense[model] = ours.flops_train, speed
        dense_flops, dense_speed = dense[model]
        rows.append(
            {
                "model": model,
                "method": method,
                "k": k,
                "pretrain_steps": paper["pretrain_steps"],
                "paper_embedding": float(paper["embedding_params"]),
                "paper_non_embedding": float(paper["non_embedding_params"]),
                **{name: value for name, value in ours.to_json().items() if isinstance(value, int)},
                "flops_to_dense": ours.flops_train / dense_flops,
                "paper_time_to_dense": dense_speed / speed,
            }
        )
    return rows


def _print_paper(rows: list[dict[str, Any]], inputs: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

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
            paper, ours = _digits(row[f"paper_{part}"], 2), _digits(row[part], 2)
            if ours != paper:
                ours = _digits(row[part], 3) + "*"
                notes.append(f"* {name}: {row[part]:,} by our count, where the paper prints {paper}.")
            cells += [paper, ours]
        view.add_row(name, *cells, f"{row['flops_to_dense']:.3f}", f"{row['paper_time_to_dense']:.2f}")
    console = Console(highlight=False)
    console.print(view)
    for note in notes:
        console.print(note)
    console.print(
        f"FLOPs for {inputs} + {rows[0]['targets']} tokens and the paper's time (on TPUs) are relative to dense.\n"
        "One model in detail: altup params --size base --method altup --k 2"
    )


def _digits(number: float, places: int) -> str:
    """3.29e7 rather than 3.29e+07: the paper's digits in few columns."""
    return f"{number:.{places}e}".replace("e+0", "e")


def _print_one(result: Accounting) -> None:
    from rich.console import Console
    from rich.table import Table

    config = result.config
    rule = f"{config.widening}, K = {config.num_blocks}" if config.widening != "none" else "not widened"
    layers = " + ".join(
        str(getattr(config, name)) for name in ("num_layers", "num_decoder_layers") if hasattr(config, name)
    )
    title = (
        f"d_model {config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads of {config.d_kv}, "
        f"{layers} layers, vocabulary {config.vocab_size}; {rule}"
    )
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
    console.print(
        f"One sequence of {_tokens(result)}, 2 FLOPs a multiply-add, activations in "
        f"bfloat16.\nTraining: {result.flops_train / 1e9:,.1f} GFLOPs (3 × forward). "
        f"Activations by the paper's formula: {result.activation_bytes_paper / 2**20:,.2f} MiB."
    )


def _tokens(result: Accounting) -> str:
    kind = result.config.model_type
    if kind == "altup_t5":
        return f"{result.inputs} + {result.targets} tokens"
    return f"{result.inputs} tokens" + (f", {result.targets} of them masked" if kind == "altup_bert" else "")
