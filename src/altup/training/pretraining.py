"""Pretraining: joins prepared data, a model by its names, and the loop."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import MOST_TOKENS, UserError, check_choice, named
from altup.core.schema import describe_settings, setting
from altup.core.text import number_of
from altup.data import HELD_OUT_PARTS
from altup.training.config import TrainConfig, warn_of_epochs
from altup.training.optimizers.config import OptimizerConfig

if TYPE_CHECKING:
    import torch

    from altup.data.batches import ShardBatches
    from altup.data.shards import TokenStream
    from altup.data.tokenizer import Vocabulary
    from altup.models.accounting import Accounting
    from altup.models.config import AltUpConfig
    from altup.models.families import Family
    from altup.training.from_model import StartingModel
    from altup.training.loop import TrainOutcome
    from altup.training.parallel import ProcessGroup

FROM_THE_DATA = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
# Of a fresh model's highest rate, for one that is trained already: docs/training.md, "Going on from a model".
GENTLER = 0.1
# Whole recipes by one word: what is not said here is the optimizer's own default. The paper's is T5's.
RECIPES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "paper": {"optimizer": "adafactor", "schedule": "rsqrt", "decay_fraction": 0.0},
}
# What a recipe decides: all of the optimizer's settings but the number of steps.
OF_RECIPE = {"recipe", *describe_settings(OptimizerConfig)} - {"steps"}
MODEL_NAMES = ("size", "method", "k", "stride", "experts", "extra_layers")


def _describe_methods() -> str:
    """The help of `--method`. It is made when it is asked for: what registers methods imports torch."""
    from altup.models.methods import PRESETS

    names = ", ".join(f"{name} ({preset.help})" for name, preset in PRESETS.items())
    return f"{names}; join several with '+'. Default: dense."


def _list_families() -> list[str]:
    from altup.models.families import FAMILIES

    return list(FAMILIES)


@dataclass(kw_only=True)
class PretrainConfig(TrainConfig):
    """A pretraining run: the model by its names, the data, the model's objective, and how to train.

    `model` is the family and decides what is learnt: t5 span corruption, bert masked and decoder causal language
    modelling. `size` unset is the family's own: `small`, for bert `light`. `model_overrides` sets any field of the
    model's config beside the names. `data` may be moved: what counts is `batches`, the description of the data
    (hashes, objective, seed), which is filled in at the start and compared when a run resumes.

    With `from_model` the run starts from a trained model, which decides all of this itself: `model` then says
    which family learns as it does. `from_seal`, filled in at the start, tells its weights from others.

    Examples:
        >>> import altup
        >>> config = altup.PretrainConfig(data="data/mine", model="decoder", size="tiny", method="altup", k=2)
        >>> config.method, config.batch_size
        ('altup', 128)
    """

    recipe: str | None = setting(
        None, "Optimizer, rates and schedule by one word: muon (default), or paper (Adafactor as T5 has it, for "
        "runs as long as the paper's).",
        panel="Training", after="micro_batch", choices=RECIPES,
    )  # fmt: skip
    optimizer: str | None = setting(None, shown="muon")
    data: str = setting("", "Folder made by `altup prepare`.", panel="Run", after="out", may_change=True)
    verify_data: bool = setting(
        False, "On resume, verify all data instead of a sample.", panel="Run", after="data", may_change=True
    )
    from_model: str | None = setting(
        None, "Start from this model: a run, a model folder or a name on the hub.", panel="Model", flag="--from"
    )
    from_seal: str | None = setting(None)
    model: str | None = setting(None, "Family: {choices}.", panel="Model", choices=_list_families, shown="t5")
    size: str | None = setting(None, "Shape: tiny, small (bert: light), base, large or xl.", panel="Model")
    method: str | None = setting(None, _describe_methods, panel="Model")
    k: int | None = setting(None, "Blocks of a widened representation.", panel="Model")
    stride: int | None = setting(None, "Stride of a sequence method.", panel="Model")
    experts: int | None = setting(None, "Partial experts beside each layer.", panel="Model")
    extra_layers: int = setting(0, "Layers added to each stack.", panel="Model")
    model_overrides: dict[str, Any] = setting(
        {}, "Any field of the model's config: --set d_ff=1024.", panel="Model", flag="--set"
    )
    dropout: float | None = setting(
        None, "Dropout.", panel="Model", at_least=0, below=1, shown="0; with --from the model's own"
    )
    z_loss: float = setting(1e-4, "Weight of the squared log-sum-exp of the logits in the loss.", at_least=0)
    inputs_length: int = setting(
        512, "Input tokens of an example.", panel="Training", after="micro_batch", at_least=4, at_most=MOST_TOKENS
    )
    noise_density: float = setting(0.15, "Part of the tokens that is corrupted.", at_least=1e-6, below=1)
    mean_span: float = setting(3.0, "Mean length of a corrupted span.", at_least=1)
    eval_sequences: int = setting(1024, "Held-out sequences.", panel="Watching", after="eval_every", at_least=1)
    eval_part: str = setting(
        "all", "Which of them: {choices}.", panel="Watching", after="eval_sequences", choices=HELD_OUT_PARTS
    )
    batches: dict[str, Any] = setting({})

    def complete(self) -> None:
        if not self.data:
            raise UserError("data is not set; give the folder that `altup prepare` made (--data DIR)")
        if self.from_model is None:
            self.model = "t5" if self.model is None else self.model
            self.method = "dense" if self.method is None else self.method
            self.dropout = 0.0 if self.dropout is None else self.dropout
            self.size = _family(self.model).default_size if self.size is None else self.size
        self._take_recipe()
        super().complete()
        if self.from_model is not None:
            self._refuse_names()
        else:
            self._check_model()

    def _take_recipe(self) -> None:
        """A recipe fills in what is not given otherwise, and is then forgotten: the settings say it all."""
        recipe = RECIPES[self.recipe or "muon"] if self.recipe or self.optimizer is None else {}
        if recipe and self.optimizer not in (None, recipe["optimizer"]):
            raise UserError(
                f"{named('recipe', self.recipe)} trains with {recipe['optimizer']}, not with "
                f"{named('optimizer', self.optimizer)}; remove one of them"
            )
        for name, value in recipe.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.recipe = None

    def defaults(self) -> dict[str, Any]:
        usual = super().defaults()
        if self.from_model is not None:
            return {**usual, "lr": GENTLER * usual["lr"]}
        if self.optimizer == "muon":
            factors = {**usual["lr_factors"], **_family(self.kind).muon_factors}
            return {**usual, "lr_factors": factors}
        return usual

    def _refuse_names(self) -> None:
        """A model that is given decides its shape and method."""
        for name in (*MODEL_NAMES, "model_overrides"):
            if value := getattr(self, name):
                raise UserError(f"{named(name, value)}: the model of --from {self.from_model} decides; remove it")

    @property
    def has_coefficients(self) -> bool:
        """As of the model's config; of a model that is given this is not known before it is loaded."""
        return self.from_model is None and self.named_model().has_coefficients

    @property
    def has_scalars(self) -> bool:
        return self.from_model is None and self.named_model().has_scalars

    @property
    def kind(self) -> str:
        """The family that learns as the model does; of a model that is given it is known once this was found."""
        if self.model is None:
            raise UserError(
                f"the model of --from {self.from_model} is known by itself; give its run or its folder"
            )
        return self.model

    @classmethod
    def merge(cls, weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
        """A method replaces the earlier one together with its k, stride and experts, a recipe all rates; overrides
        add up."""
        if strong.get("recipe"):
            weak = {name: value for name, value in weak.items() if name not in OF_RECIPE}
        if "method" in strong:
            weak = {name: value for name, value in weak.items() if name not in ("k", "stride", "experts")}
        both = [values.get("model_overrides") or {} for values in (weak, strong)]
        for overrides in both:
            if not isinstance(overrides, dict):
                raise UserError(f"{named('model_overrides', overrides)}: expected `name: value` pairs")
        return {**super().merge(weak, strong), "model_overrides": {**both[0], **both[1]}}

    def _check_model(self) -> None:
        """Refuse an impossible model before data is read."""
        from transformers import PreTrainedConfig

        known = _family(self.kind).config_class.field_names() - FROM_THE_DATA
        for name, value in self.model_overrides.items():
            if name in MODEL_NAMES:
                raise UserError(
                    f"model_overrides: {named(name, value)} is a setting of its own; give that instead of an "
                    "override"
                )
            if name not in known:  # of Transformers' own fields few concern a model's shape: they are not listed
                check_choice("model_overrides", name, sorted(known - {f.name for f in fields(PreTrainedConfig)}))
        self.named_model()

    def named_model(self, **of_the_data: int) -> AltUpConfig:
        """The model's config by its names and overrides, without what the data decide."""
        family = _family(self.kind)
        names = {name: getattr(self, name) for name in MODEL_NAMES}
        own = {**of_the_data, **family.run_fields(self.dropout or 0.0, self.inputs_length), "z_loss": self.z_loss}
        config: AltUpConfig = family.config_class.from_preset(**names, **{**own, **self.model_overrides})
        return config

    def model_config(self, vocabulary: Vocabulary) -> AltUpConfig:
        """The model for a vocabulary; its tables have rows for every token, rounded up to 128."""
        tokens = {"vocab_size": vocabulary.padded_size, "pad_token_id": vocabulary.pad}
        config = self.named_model(**tokens, **_family(self.kind).special_tokens(vocabulary))
        if config.vocab_size < vocabulary.size:
            raise UserError(
                f"{named('vocab_size', config.vocab_size)} is less than the data's {vocabulary.size} tokens; "
                "leave it out"
            )
        return config


def _family(model: str) -> Family:
    """Imported when it is used: the command line's help is made from the config above, and needs no torch."""
    from altup.models.families import family

    return family(model)


def build_model(model: str, model_config: AltUpConfig, checkpoint: Path | None) -> torch.nn.Module:
    """A fresh model, or the one a checkpoint holds, with float32 weights."""
    import torch

    from altup.core.pretrained import load_model
    from altup.models.accounting import refuse_too_large

    model_class = _family(model).model_class
    if checkpoint is None:
        refuse_too_large(model_config)
        return model_class(model_config)
    resumed: torch.nn.Module = load_model(model_class, checkpoint, dtype=torch.float32)
    return resumed


def build_skeleton(
    model: str, model_config: AltUpConfig, world_size: int, checkpoint: Path | None
) -> torch.nn.Module:
    """The model with fresh weights, shaped as a checkpoint's where one is given."""
    from altup.core.pretrained import load_config
    from altup.models.accounting import refuse_too_large

    family = _family(model)
    if checkpoint is None:
        refuse_too_large(model_config, world_size)
        return family.model_class(model_config)
    resumed: torch.nn.Module = family.model_class(load_config(checkpoint, family.config_class))
    return resumed


def pretrain(
    config: PretrainConfig,
    out: str | Path,
    resume: bool = False,
    push_to_hub: str | None = None,
    stop_collapsed: bool = False,
) -> TrainOutcome:
    """Train as `config` says in the folder `out`, under `torchrun` with the other processes.

    Args:
        config: What to train, on what and how.
        out: The folder of the run.
        resume: Continue from the newest whole checkpoint in `out`, if there is one.
        push_to_hub: A Hugging Face repository to upload the final model to.
        stop_collapsed: Raise an error once the held-out loss was more than a nat above its own lowest at two
            evaluations in a row, instead of training a lost model to its last step.

    Returns:
        How the run ended: `finished`, `step`, `evaluation` (the last held-out figures) and `skipped`.

    Examples:
        >>> import altup
        >>> config = altup.PretrainConfig(data="data/mine", method="altup", k=2, steps=2500)
        >>> outcome = altup.pretrain(config, "runs/altup")  # doctest: +SKIP
    """
    from altup.core.pretrained import load_tokenizer
    from altup.data.batches import HeldOut, ShardBatches
    from altup.data.objectives import build_objective
    from altup.data.shards import SAMPLE, TOKENIZER, TokenStream, verify
    from altup.models.accounting import account
    from altup.training.from_model import find_start
    from altup.training.loop import Loop
    from altup.training.metrics import held_out_loss
    from altup.training.model_card import create_repository, upload, write_card
    from altup.training.parallel import join_process_group
    from altup.training.run_folder import RunFolder

    with join_process_group() as process_group:
        data, folder = Path(config.data), RunFolder(Path(out))
        if process_group.is_first:
            verify(data, SAMPLE if folder.started and not config.verify_data else None)
        if process_group.is_first and push_to_hub:
            create_repository(push_to_hub)
        text, unseen = TokenStream(data, "train"), TokenStream(data, "validation")
        vocabulary, tokenizer = text.vocabulary, load_tokenizer(data / TOKENIZER)
        start = find_start(config, folder, process_group) if config.from_model is not None else None
        if start:
            start.check_data(data, tokenizer, vocabulary, config.inputs_length)
            config = replace(config, model=start.kind, from_seal=start.seal)
        name = _family(config.kind).objective
        objective = build_objective(name, vocabulary, config.inputs_length, config.noise_density, config.mean_span)
        batches = ShardBatches(text, objective, config.batch_size, config.seed)
        validation = HeldOut(unseen, objective, config.eval_sequences, part=config.eval_part)
        config = replace(config, batches={**batches.describe(), "validation": validation.describe()})
        model_config = start.config if start else config.model_config(vocabulary)
        start_from = functools.partial(start.build, config.z_loss) if start else None
        is_altup, world_size = start is None or start.is_altup, process_group.world_size
        cost = account(model_config, config.inputs_length, objective.targets) if is_altup else None

        def afterwards(outcome: TrainOutcome) -> None:
            title = f"{Path(start.name).name}, trained further" if start else f"{config.method} {config.size}"
            write_card(
                folder, config, title=title, data=_describe(config, start, cost, name, outcome.step, text),
                verb="pretrain", example=example_command(config.kind, folder.path), model=config.kind,
                widened=start is not None and start.widened,
            )  # fmt: skip

        outcome = Loop(
            config=config,
            folder=folder,
            process_group=process_group,
            batches=batches,
            build_model=start_from or functools.partial(build_model, config.kind, model_config),
            skeleton=None if start else functools.partial(build_skeleton, config.kind, model_config, world_size),
            make_evaluate=lambda engine: held_out_loss(
                validation, config.micro_batch or config.batch_size, process_group, engine.autocast
            ),
            tokenizer=tokenizer,
            flops=cost.flops_train if cost else None,
            introduction=_introduction(config, start, cost, batches, process_group),
            afterwards=afterwards,
            measures_start=start is not None,
            stops_collapsed=stop_collapsed,
        ).run(resume)
        if process_group.is_first and push_to_hub and outcome.finished:
            upload(folder, push_to_hub)
    return outcome


def _describe(
    config: PretrainConfig,
    start: StartingModel | None,
    cost: Accounting | None,
    objective: str,
    steps: int,
    text: TokenStream,
) -> str:
    """What was trained on what, for the model card."""
    learnt = "span corruption" if objective == "span-corruption" else f"{objective} language modelling"
    parameters = f"{cost.total:,} parameters" if cost else "transformers' own class"
    if start:
        origin = f"`{start.name}` (weights {str(start.seal)[:16]}…)"
        what = f"{start.title} ({parameters}), which began as {origin}, trained further"
    else:
        title = _family(config.kind).title
        what = f"{title} of size {config.size} ({parameters}, method {config.method}), pretrained"
    return (
        f"{what} by {learnt} for {number_of(steps, 'step')} at batch {config.batch_size} on "
        f"{len(text):,} tokens (SHA-256 of the shards {text.sha256[:16]}…)."
    )


def example_command(model: str, run: Path) -> str:
    """A command that shows what a trained model does."""
    return f"altup generate {shlex.quote(str(run))} --prompt {shlex.quote(_family(model).prompt)}"


def _introduction(
    config: PretrainConfig,
    start: StartingModel | None,
    cost: Accounting | None,
    batches: ShardBatches,
    process_group: ProcessGroup,
) -> list[str]:
    """The run that is about to start, on one line, and a warning where the text is short."""
    epochs = config.steps * config.batch_size / batches.sequences_per_epoch
    where = (
        f"{process_group.world_size} × {process_group.device.type}"
        if process_group.world_size > 1
        else process_group.device.type
    )
    what = f"{start.title}, from {start.name}" if start else f"{config.method} {config.size} {config.kind}"
    line = (
        f"{what}{f': {cost.total:,} parameters' if cost else ''}; "
        f"{number_of(config.steps, 'step')} of {number_of(config.batch_size, 'sequence')}, "
        f"{epochs:,.2f} epochs; {config.precision} on {where}"
    )
    return [line, *warn_of_epochs(epochs), *warn_of_none(config)]


def warn_of_none(config: PretrainConfig) -> list[str]:
    """A line for settings of coefficients that the model has not. No error, as studies give them to all rows."""
    if config.from_model is not None or config.has_scalars:
        return []
    given = {"coefficient_decay": config.coefficient_decay, "coefficient_growth": config.coefficient_growth}
    return [
        f"warning: {name}={value:g} changes nothing: no coefficients of this model ({config.method}) are numbers "
        "that learn"
        for name, value in given.items()
        if value
    ]
