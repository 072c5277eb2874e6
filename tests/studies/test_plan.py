"""Plans: which runs there are, what identifies them, and for what they wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.studies.jobs import SPEED_FIELDS, StudyData, count_costs, deciding_fields, speed_key
from altup.studies.plan import Context, Plan, make_plan
from altup.studies.results import Record
from altup.studies.run import Device
from altup.studies.scale import SCALES, Scale, Tuning, find_scale, prepare_smoke_tasks, with_settings
from altup.studies.study import Study, shipped
from altup.training.pretraining import PretrainConfig
from tests.studies.samples import TEXT, TWO, first_jobs, read_study, record, study_run


def planned(
    studies: list[Study],
    scale: Scale,
    data: Path,
    out: Path,
    known: dict[str, Record] | None = None,
    **options: object,
) -> Plan:
    context = Context(
        scale, StudyData.prepared(str(data), None), ({} if known is None else known).get, "a machine"
    )
    return make_plan(studies, context, out, **{"seeds": [0], "speed": False, **options})


@pytest.mark.parametrize("name", SCALES)
def test_every_study_can_be_planned_at_every_scale(name: str, tmp_path: Path) -> None:
    """The models exist and their settings go together; every curve has at least 20 points, or one a step."""
    scale = find_scale(name)
    context = Context(scale, StudyData.not_prepared(None), lambda key: None, "a machine")
    for study in shipped().values():
        plan = make_plan([study], context, tmp_path, seeds=[5])
        assert len(plan.trials) >= 2, study.name
        assert plan.todo(), study.name
        for trial in plan.trials:
            config = trial.model.untuned
            assert config.steps // config.eval_every >= min(20, config.steps), (study.name, trial.title)


def test_the_paper_scale_is_the_papers_setting(tmp_path: Path) -> None:
    context = Context(find_scale("paper"), StudyData.not_prepared(None), lambda key: None, "a machine")

    def steps(study: str, size: str) -> int:
        trials = make_plan([shipped()[study]], context, tmp_path, seeds=[0], only=["AltUp K=2"]).trials
        config = next(trial.model.untuned for trial in trials if trial.model.variant.size == size)
        recipe = (config.batch_size, config.inputs_length, config.optimizer, config.dropout)
        assert recipe == (256, 512, "adafactor", 0)
        schedule = (config.schedule, config.lr, config.warmup_steps, config.decay_fraction)
        assert schedule == ("rsqrt", 1.0, 10_000, 0)
        return config.steps

    assert steps("varying-k", "large") == 500_000
    assert steps("parameters-and-speed", "xl") == 400_000
    assert steps("dense-scaling", "base") == 250_000
    assert steps("experts", "small") == 100_000


def test_a_run_is_keyed_by_what_it_computes(scale: Scale, data: Path, tmp_path: Path) -> None:
    def keys(scale: Scale, text: str = TEXT, seed: int = 0) -> list[str]:
        return [job.key for job in first_jobs(tmp_path, scale, data, read_study(text), seeds=[seed])]

    usual = keys(scale)
    assert len(set(usual)) == 2
    assert keys(scale, TEXT.replace("Two", "Three")) == usual
    assert keys(with_settings(scale, {"log_every": 3})) == usual
    for other in (
        keys(with_settings(scale, {"lr": 0.5})),
        keys(scale, seed=1),
        keys(scale, TEXT.replace("method: ", "z_loss: 0.1, method: ")),
    ):
        assert not set(other) & set(usual)
    assert keys(scale, TEXT.replace("k: 2}", "k: 4}"))[0] == usual[0]


def test_every_shared_run_is_planned_once(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Dense, AltUp K=2 and K=4 of one study, Dense, AltUp and Recycled of another; seed by seed."""
    jobs = first_jobs(tmp_path, scale, data, shipped()["varying-k"], shipped()["recycled"], seeds=[0, 1])
    assert len(jobs) == 2 * 4
    seeds = [job.settings["config"]["seed"] for job in jobs]
    assert seeds[:3] == [0, 0, 0]
    only = first_jobs(tmp_path, scale, data, shipped()["varying-k"], only=["Dense"])
    assert [job.settings["config"]["method"] for job in only] == ["dense"]
    with pytest.raises(UserError, match="did you mean 'Dense'"):
        first_jobs(tmp_path, scale, data, only=["Dens"])


def test_of_every_setting_it_is_known_whether_it_changes_the_speed() -> None:
    """A new setting must be added to one side."""
    without_effect = {
        *("steps", "lr", "schedule", "warmup_steps", "decay_fraction", "weight_decay"),
        *("beta1", "beta2", "lr_factors"),
        *("z_loss", "seed", "on_spike", "coefficient_decay", "coefficient_growth", "muon_growth"),
        *("eval_sequences", "eval_part", "from_model", "from_seal", "recipe"),
    }  # fmt: skip
    config = PretrainConfig(data="data", size="tiny")
    known = {name for name in vars(config) if name not in type(config).may_change() and name != "batches"}
    assert known - set(SPEED_FIELDS) - without_effect == set()
    deeper = replace(config, extra_layers=1)
    assert speed_key(config, 4000, "here") != speed_key(deeper, 4000, "here")
    assert speed_key(config, 4000, "here") != speed_key(config, 4000, "there")
    assert speed_key(config, 4000, "here") == speed_key(replace(config, lr=1.0), 4000, "here")


def speeds(plan: Plan, relative: dict[str, float]) -> dict[str, Record]:
    """What comparisons of speed would have recorded: the dense model makes ten steps a second."""
    found = {}
    for trial in plan.trials:
        own = {"train_seq_per_s": 1.0, "relative_speed": relative[trial.model.row.label]}
        found[trial.model.speed_key] = record("s", measures=own)
        batch = trial.model.untuned.batch_size
        found[trial.model.dense_key] = record(
            "d", measures={"train_seq_per_s": 10.0 * batch, "relative_speed": 1.0}
        )
    return found


TIMED = TEXT + "equal_time: AltUp K=2\nlengths: {smoke: [8, 40]}\n"


def test_equal_time_waits_for_speeds_and_gives_steps_by_them(scale: Scale, data: Path, tmp_path: Path) -> None:
    """At 0.8 of dense's speed AltUp's 8 and 40 steps are 10 and 50 of dense."""
    scale, study = replace(scale, given={}), read_study(TIMED)
    before = planned([study], scale, data, tmp_path)
    assert [job.kind for job in before.todo()] == ["pretrain", "pretrain", "speed"]  # AltUp's own steps are known
    known = speeds(before, {"Dense": 1.0, "AltUp K=2": 0.8})
    plan = planned([study], scale, data, tmp_path, known)
    steps = {(t.model.row.label, t.model.variant.steps): t.jobs()[""].steps for t in plan.trials}
    assert steps == {("Dense", 8): 10, ("AltUp K=2", 8): 8, ("Dense", 40): 50, ("AltUp K=2", 40): 40}
    model = plan.trials[0].model
    assert model.seconds_a_step() == pytest.approx(0.1)
    assert model.budget == "the time of AltUp K=2's 8 steps of 4"
    assert len({trial.model.budget for trial in plan.trials}) == 2  # one a length


def test_equal_flops_gives_steps_by_what_a_step_costs(scale: Scale, data: Path, tmp_path: Path) -> None:
    study = read_study(TEXT + "equal_flops: AltUp K=2\n")
    plan = planned([study], with_settings(scale, {"steps": 1000}), data, tmp_path)
    dense, altup = (trial.jobs()[""] for trial in plan.trials)
    vocabulary = plan.context.data.vocabulary
    flops = [
        job.steps * count_costs(PretrainConfig.from_dict(job.settings["config"], ""), vocabulary)["flops_train"]
        for job in (dense, altup)
    ]
    assert altup.steps == 1000 < dense.steps
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)


def test_speeds_are_compared_with_a_dense_model_trained_alike(scale: Scale, data: Path, tmp_path: Path) -> None:
    """A dense model of the same batch, a few models a comparison, and nothing that is known is measured again."""
    study = shipped()["block-selection"]
    plan = planned([study], scale, data, tmp_path, speed=True)
    *_, job = plan.todo()
    configs = list(job.settings["configs"].values())
    assert [config["method"] for config in configs] == ["dense", "sum", "sameup", "altup"]
    assert len({config["batch_size"] for config in configs}) == 1
    known = speeds(plan, dict.fromkeys([row.label for row in study.rows], 1.0))
    again = planned([study], scale, data, tmp_path, known, speed=True)
    assert "speed" not in {job.kind for job in again.todo()}
    few = planned([study], replace(scale, speed={**scale.speed, "together": 2}), data, tmp_path, speed=True)
    assert [len(job.records) for job in few.todo() if job.kind == "speed"] == [3, 2]


@pytest.fixture
def tuned(scale: Scale) -> Scale:
    return replace(scale, seeds=[1], tune=Tuning({"lr": [0.01, 0.03], "z_loss": [0.0, 0.1]}, steps=2))


def test_a_model_is_tuned_on_other_text_with_another_seed_and_then_run(
    tuned: Scale, data: Path, tmp_path: Path
) -> None:
    known: dict[str, Record] = {}
    plan = planned([TWO], tuned, data, tmp_path, known, seeds=[1])
    made: list[tuple[str, float, float]] = []
    while jobs := plan.todo():
        for job in jobs:
            config = job.settings["config"]
            loss = config["lr"] + config["z_loss"] + (config["method"] == "dense") * (1 - 2 * config["lr"])
            known[job.key] = record(
                job.key,
                measures={"loss": loss, "accuracy": 1.0},
                **{"sweep": {}} if "sweep" in job.settings else {},
            )
            made.append((config["method"], config["lr"], config["z_loss"]))
            if "sweep" in job.settings:
                assert (config["eval_part"], config["seed"], job.steps) == ("tuning", 0, 2)
            else:
                assert (config["eval_part"], config["seed"], job.steps) == ("reporting", 1, 4)
    assert len(made) == 2 * (3 + 1)
    assert ("dense", 0.03, 0.0) in made[-2:]
    assert ("altup", 0.01, 0.0) in made[-2:]


def test_what_follows_from_the_number_of_steps_follows_from_the_runs_own(
    scale: Scale, data: Path, tmp_path: Path
) -> None:
    """The warmup of a short sweep, and of a run that shares the FLOPs of a short one, ends before they do."""
    settings = {"optimizer": "adamw", "schedule": "cosine", "steps": 10_000}
    scale = replace(scale, given={}, pretrain={**scale.pretrain, **settings})
    short = PretrainConfig(data="data", size="tiny", optimizer="adamw", steps=1000).warmup_steps
    assert 0 < short < PretrainConfig(data="data", size="tiny", optimizer="adamw", steps=10_000).warmup_steps
    tuned = replace(scale, seeds=[1], tune=Tuning({"lr": [0.001, 0.003]}, steps=1000))
    for job in planned([TWO], tuned, data, tmp_path, seeds=[1]).todo():
        assert (job.steps, job.settings["config"]["warmup_steps"]) == (1000, short)
    assert study_run(tmp_path, tuned, data, seeds=[1], dry=True).forecast(Device.find("H200"))
    rows = TEXT.replace("k: 2}", "k: 2, steps: 1000}") + "equal_flops: AltUp K=2\n"
    dense, altup = planned([read_study(rows)], scale, data, tmp_path).todo()
    assert 1000 == altup.steps < dense.steps < 2000
    assert dense.settings["config"]["warmup_steps"] == pytest.approx(short * dense.steps / 1000, abs=1)


def test_what_a_row_or_the_user_sets_is_not_swept(tuned: Scale, data: Path, tmp_path: Path) -> None:
    text = TEXT.replace("{method: dense}", "{method: dense, lr: 0.02, tune: [lr]}")
    dense, altup = planned([read_study(text)], tuned, data, tmp_path, seeds=[1]).trials
    assert (list(dense.model.grid), list(altup.model.grid)) == ([], ["lr", "z_loss"])
    assert dense.jobs()[""].settings["config"]["lr"] == 0.02
    own = TEXT.replace("{method: dense}", "{method: dense, tune: {lr: [1.0, 2.0]}}")
    given = planned([read_study(own)], with_settings(tuned, {"z_loss": 0.5}), data, tmp_path, seeds=[1]).trials
    assert [trial.model.grid for trial in given] == [{"lr": [1.0, 2.0]}, {"lr": [0.01, 0.03]}]


def test_lengths_of_a_study_share_a_sweep(tuned: Scale, data: Path, tmp_path: Path) -> None:
    study = read_study(TEXT + "lengths: {smoke: [8, 40]}\n")
    jobs = planned([study], replace(tuned, given={}), data, tmp_path, seeds=[1, 2]).todo()
    assert len(jobs) == 2 * 2
    assert all(job.steps == 2 for job in jobs)


CONTINUING = """
title: Further
question: Which?
rows:
  Before: {method: dense}
  Dense: {continues: Before, method: dense}
  AltUp K=2: {continues: Before, method: altup, k: 2}
"""


def test_who_continues_waits_for_the_model_and_sees_other_batches(
    scale: Scale, data: Path, tmp_path: Path
) -> None:
    """At a tenth of the rate, where none is given; nobody continues a model that diverged."""
    known: dict[str, Record] = {}
    scale = replace(scale, pretrain={**scale.pretrain, "lr": None})
    plan = planned([read_study(CONTINUING)], scale, data, tmp_path, known)
    (before,) = plan.todo()
    known[before.key] = record(before.key, measures={"loss": 1.0})
    (tmp_path / "runs" / f"it-{before.key}" / "final").mkdir(parents=True)
    jobs = plan.todo()
    assert [job.needs for job in jobs] == [(before.key,)] * 2
    for job in jobs:
        assert job.settings["config"]["lr"] == pytest.approx(before.settings["config"]["lr"] / 10)
        assert job.settings["config"]["seed"] == before.settings["config"]["seed"] + 1000
    (tmp_path / "runs" / f"it-{before.key}" / "final").rmdir()
    assert [job.key for job in plan.todo()] == [before.key]  # its record is here, but its model is not
    known[before.key] = record(before.key, diverged="a spike")
    lost = planned([read_study(CONTINUING)], scale, data, tmp_path, known)
    assert lost.todo() == []
    assert ["diverged" in reason for reason in lost.stuck()] == [True, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("AltUp K=2: {continues: Before", "AltUp K=2: {continues: Before, extra_layers: 1"), "they must agree"),
        (("Before: {method: dense}", "Before: {method: sum}"), "continue a dense one"),
        (("method: altup, k: 2", "method: moe"), "method"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    change: tuple[str, str], words: str, scale: Scale, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        planned([read_study(CONTINUING.replace(*change))], scale, data, tmp_path)


def test_fine_tuning_is_keyed_by_what_the_task_files_hold(scale: Scale, data: Path, tmp_path: Path) -> None:
    tasks = prepare_smoke_tasks(tmp_path)
    study = read_study(TEXT + "finetune: [glue]\nfinetune_at: [smoke]\n")

    def columns() -> dict[str, str]:
        run = study_run(tmp_path / "out", scale, data, study, tasks=str(tasks))
        trial = run.plan.trials[0]
        run.known._records[trial.jobs()[""].key] = record("x", measures={"loss": 1.0})
        return {name: job.key for name, job in trial.jobs().items()}

    before = columns()
    assert columns() == before
    path = tasks / "glue" / "cola" / "train.jsonl"
    path.write_text(path.read_text().replace('"sentence": "', '"sentence": "So ', 1))
    after = columns()
    assert after[""] == before[""]
    assert after["glue"] != before["glue"]


def test_seeds_of_sweeps_are_not_reported(tuned: Scale, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seed 0 is that of the sweeps"):
        first_jobs(tmp_path, tuned, data, seeds=[0, 1])


def test_deciding_fields_are_what_differs_from_the_defaults() -> None:
    found = deciding_fields(PretrainConfig(data="here", size="tiny", steps=7, log_every=3))
    assert found["steps"] == 7
    assert not {"data", "log_every", "eval_part"} & found.keys()
