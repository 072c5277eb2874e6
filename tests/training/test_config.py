"""A config resolves its defaults, survives YAML, and refuses what makes no sense, by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from altup.core.errors import UserError
from altup.core.schema import read_yaml
from altup.training.config import TrainConfig
from altup.training.pretraining import PretrainConfig, warn_of_none


def test_the_defaults_are_those_of_t5() -> None:
    config = TrainConfig()
    assert (config.optimizer, config.schedule, config.lr, config.warmup_steps) == (
        "adafactor",
        "rsqrt",
        1.0,
        10_000,
    )
    assert (config.weight_decay, config.clip_norm, config.micro_batch) == (0.0, None, config.batch_size)
    assert TrainConfig(schedule="constant").lr == 0.01
    assert TrainConfig(optimizer="adamw", steps=500).warmup_steps == 50


def test_pretraining_trains_with_muon_however_long_it_is() -> None:
    """As measured; the paper's recipe is one word away."""
    short = PretrainConfig(data="x", model="decoder", steps=4_000)
    assert (short.optimizer, short.schedule, short.lr, short.decay_fraction) == ("muon", "constant", 0.06, 0.7)
    assert (short.warmup_steps, short.lr_factors) == (50, {"embeddings": 4.0})
    assert PretrainConfig(data="x", steps=60).warmup_steps == 6
    assert PretrainConfig(data="x", schedule="cosine").decay_fraction == 0.0
    assert replace(short, steps=500_000).optimizer == PretrainConfig(data="x", steps=500_000).optimizer == "muon"
    paper = PretrainConfig(data="x", optimizer="adafactor")
    assert (paper.schedule, paper.lr, paper.warmup_steps, paper.lr_factors) == ("rsqrt", 1.0, 10_000, {})


def test_a_recipe_is_one_word_for_its_settings(tmp_path: Path) -> None:
    """The paper's: lr = 1/√max(step, 10,000), to the end. It replaces a file's rates, flags win over it, and the
    config that is saved says what it stands for."""
    paper = PretrainConfig(data="x", recipe="paper", steps=40_000)
    assert (paper.optimizer, paper.decay_fraction, paper.lr_factors, paper.recipe) == ("adafactor", 0.0, {}, None)
    rate = paper.rate()
    assert [rate(step) for step in (0, 10_000, 39_999)] == pytest.approx([0.01, 0.01, 39_999**-0.5])
    assert PretrainConfig(data="x", recipe="muon") == PretrainConfig(data="x")
    assert PretrainConfig(data="x", recipe="muon", steps=100_000).optimizer == "muon"
    muon = PretrainConfig(data="x", steps=40_000, lr=0.03)
    (tmp_path / "run.yaml").write_text(muon.to_yaml())
    flags = {"recipe": "paper"}
    assert PretrainConfig.resolve({}, tmp_path / "run.yaml", flags) == paper
    assert PretrainConfig.resolve({}, tmp_path / "run.yaml", {**flags, "lr": 0.5}).lr == 0.5
    assert paper.difference(PretrainConfig.resolve(yaml.safe_load(paper.to_yaml()), None, flags)) == {}
    with pytest.raises(UserError, match="recipe='paper' trains with adafactor, not with optimizer='muon'"):
        PretrainConfig.resolve({}, None, {"data": "x", "optimizer": "muon", **flags})


def test_factors_of_a_file_and_of_flags_add_up(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: x\nmodel: decoder\nlr_factors: {embeddings: 8, coefficients: 0.1}\n")
    config = PretrainConfig.resolve({}, file, {"lr_factors": {"head": 2.0, "coefficients": 0.3}})
    assert config.lr_factors == {"embeddings": 8.0, "coefficients": 0.3, "head": 2.0}


def test_a_new_t5_has_fast_positions_and_slow_norms(tmp_path: Path) -> None:
    """With Muon, unless they are set. Other models have no such tables, other optimizers no such unit."""

    def factors(**values: Any) -> dict[str, float]:
        return PretrainConfig(**{"data": "x", **values}).lr_factors

    assert factors() == factors(recipe="muon") == {"embeddings": 4.0, "positions": 4.0, "vectors": 0.1}
    assert factors(steps=60_000) == factors()
    assert factors(lr_factors={"positions": 8.0}) == {"embeddings": 4.0, "positions": 8.0, "vectors": 0.1}
    assert factors(lr_factors={"embeddings": 1.0})["embeddings"] == 1.0
    assert factors(model="decoder") == factors(model="bert") == factors(from_model="m") == {"embeddings": 4.0}
    assert factors(optimizer="adamw-rms") == factors(recipe="paper") == {}
    (tmp_path / "other.yaml").write_text("data: x\nlr_factors: {vectors: 0.3}")
    found = PretrainConfig.resolve({}, tmp_path / "other.yaml", {})
    assert found.lr_factors == {"embeddings": 4.0, "positions": 4.0, "vectors": 0.3}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "bert", "method": "altup", "k": 3, "steps": 77},
        {"model": "decoder", "recipe": "paper", "micro_batch": 32},
        {"from_model": "somewhere", "lr_factors": {"head": 2.0}},
        {"optimizer": "adamw", "lr": 0.003, "trackers": ["none"]},
    ],
    ids=str,
)
def test_a_config_is_the_same_by_python_by_flags_and_by_files(values: dict[str, Any], tmp_path: Path) -> None:
    """And complete: completing it again, or reading what was saved, changes nothing."""
    by_python = PretrainConfig(data="x", **values)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": "x", **values}))
    assert PretrainConfig.resolve({}, None, {"data": "x", **values}) == by_python
    assert PretrainConfig.resolve({}, tmp_path / "run.yaml", {}) == by_python
    assert PretrainConfig.resolve(asdict(by_python), None, values) == by_python
    assert replace(by_python) == by_python
    assert PretrainConfig.from_dict(yaml.safe_load(by_python.to_yaml()), "config.yaml") == by_python


@pytest.mark.parametrize(
    ("other", "flags"),
    [({"model": "decoder"}, {"model": "t5", "size": "small"}), ({"recipe": "paper"}, {"optimizer": "muon"})],
)
def test_another_models_config_makes_a_new_t5(
    other: dict[str, str], flags: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text(PretrainConfig(data="x", **other).to_yaml())
    found = PretrainConfig.resolve({}, tmp_path / "other.yaml", flags).lr_factors
    assert {part: found[part] for part in ("positions", "vectors")} == {"positions": 4.0, "vectors": 0.1}


def test_betas_reach_the_optimizer() -> None:
    from altup.training.engine import Engine
    from tests.training.tiny import ALONE, build

    config = TrainConfig(optimizer="adamw-rms", beta2=0.98, precision="fp32")
    assert {group["betas"] for group in Engine(build(), config, ALONE).optimizer.param_groups} == {(0.9, 0.98)}


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(optimizer="adamw", clip_norm=1.0, steps=77, trackers=["tensorboard"]),
        PretrainConfig(data="x", method="altup+moe", k=4, model_overrides={"d_ff": 64, "selection": "same"}),
    ],
)
def test_yaml_round_trip(config: TrainConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = type(config).from_dict(read_yaml(path), "config.yaml")
    assert again == config
    assert again.to_yaml() == config.to_yaml()


def test_yaml_1e_minus_3_is_a_number() -> None:
    """YAML 1.1 reads it as text."""
    assert yaml.safe_load("lr: 1e-3") == {"lr": "1e-3"}
    assert TrainConfig(**yaml.safe_load("lr: 1e-3")).lr == 0.001


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepps": 3}, r"run.yaml: unknown key 'stepps'; did you mean 'steps'\?"),
        ({"batchsize": 3}, r"did you mean 'batch_size'\?"),
        ({"steps": 0}, "steps=0 makes no sense"),
        ({"steps": "many"}, "steps='many' is of the wrong kind; give a whole number"),
        ({"steps": True}, "steps=True is of the wrong kind"),
        ({"lr": "fast"}, "lr='fast' is of the wrong kind"),
        ({"lr": -1.0}, r"lr=-1.0 makes no sense"),
        ({"optimizer": "adamw", "beta2": 1.0}, r"beta2=1.0 makes no sense"),
        ({"optimizer": "adafactor", "beta1": 0.9}, r"beta1=0.9 is for 'adamw', 'adamw-rms' and 'muon'"),
        ({"batch_size": 12, "micro_batch": 5}, r"micro_batch=5 does not divide batch_size=12; try [46]"),
        ({"optimizer": "adamw", "muon_growth": 3.0}, r"muon_growth=3\.0 is for optimizer='muon'"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not known; choose one of 'adafactor'"),
        ({"schedule": "wavy"}, "schedule='wavy' is not known"),
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"parallel": "tensor"}, "parallel='tensor'"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 makes no sense; give a number above 0"),
        ({"save_every": 0}, "save_every=0"),
        ({"trackers": ["stars"]}, "trackers='stars' is not known"),
        ({"data": ""}, "data is not set; .*altup prepare"),
        ({"size": "huge"}, "size='huge' is not known"),
        ({"size": ""}, "size='' is not known"),
        ({"method": ""}, "method='' is not known"),
        ({"method": "altup", "k": 0}, "k=0 makes no sense"),
        ({"method": "dense", "k": 3}, "k=3 does not fit method='dense'"),
        ({"model_overrides": {"d_fff": 3}}, "model_overrides='d_fff' is not known"),
        ({"method": "sequence-altup", "model_overrides": {"stride": 2}}, "stride=2 is a setting of its own"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"inputs_length": 0}, "inputs_length=0"),
    ],
)
def test_nonsense_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PretrainConfig.from_dict({"data": "somewhere", **values}, "run.yaml")


def test_what_may_change_when_a_run_goes_on() -> None:
    first = TrainConfig(steps=100)
    assert not first.difference(TrainConfig(steps=100, log_every=7, micro_batch=16, parallel="fsdp"))
    assert first.difference(TrainConfig(steps=200)) == {"steps": (100, 200)}
    assert first.difference(TrainConfig(steps=100, lr=0.5, seed=3)) == {"lr": (1.0, 0.5), "seed": (0, 3)}
    open_end = {"schedule": "constant", "decay_fraction": 0.0}
    assert not TrainConfig(steps=100, **open_end).difference(TrainConfig(steps=200, **open_end))


@pytest.mark.parametrize(
    "values",
    [
        {"inputs_length": 10**11},
        {"batch_size": 10**12, "micro_batch": 7},
        {"seed": 2**64},
        {"k": 1_000_000, "method": "altup"},
        {"extra_layers": 10**9},
        {"experts": 10**12, "method": "moe"},
        {"model_overrides": {"num_layers": 10**9}},
        {"model_overrides": {"num_decoder_layers": 10**9}},
        {"model_overrides": {"d_ff": 10**15}},
    ],
    ids=str,
)
def test_numbers_that_nothing_could_be_built_with(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="makes no sense"):
        PretrainConfig(data="x", **values)


@pytest.mark.parametrize(
    ("model", "has_any"),
    [
        ({"method": "dense"}, False),
        ({"method": "sum", "k": 2}, False),
        ({"method": "altup"}, True),
        ({"method": "recycled"}, True),
        ({"method": "altup", "model_overrides": {"coefficients": "fixed"}}, False),
        ({"method": "altup", "model_overrides": {"coefficients": "dynamic"}}, False),
        ({"method": "sequence-altup+altup", "model_overrides": {"coefficients": "dynamic"}}, True),
    ],
    ids=str,
)
def test_a_decay_of_coefficients_that_nothing_has_is_told(model: dict[str, Any], has_any: bool) -> None:
    """As the optimizer sees it: the models are built."""
    from altup.training.pretraining import build_model
    from tests.training.tiny import optimizer_of

    config = PretrainConfig(data="text", size="tiny", optimizer="muon", coefficient_decay=4.0, **model)
    built = build_model("t5", config.named_model(vocab_size=32), None)
    optimizer = optimizer_of("muon", built, lr=0.1, coefficient_decay=4.0)
    assert any(group["pull"] for group in optimizer.param_groups) == has_any
    assert [line.split(":")[1] for line in warn_of_none(config)] == ([] if has_any else [
        " coefficient_decay=4 changes nothing"
    ])  # fmt: skip


def test_growth_of_coefficients_is_for_muon() -> None:
    """And is not filled in, so that a saved config can be given another optimizer."""
    saved = PretrainConfig(data="text", method="altup", optimizer="muon")
    assert saved.coefficient_growth is None
    assert PretrainConfig.resolve(asdict(saved), None, {"optimizer": "adamw"}).optimizer == "adamw"
    assert replace(saved, optimizer="adafactor").coefficient_growth is None
    with pytest.raises(UserError, match=r"coefficient_growth=4\.0 is for optimizer='muon'"):
        replace(saved, optimizer="adamw", coefficient_growth=4.0)
    with pytest.raises(UserError, match=r"coefficient_decay=4\.0 is for optimizer='muon'"):
        replace(saved, optimizer="adamw", coefficient_decay=4.0)
