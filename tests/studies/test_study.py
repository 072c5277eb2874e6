"""The declarations: every table of the paper is covered, and mistakes are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.models import AltUpT5Config
from altup.models.methods import list_presets
from altup.studies import paper
from altup.studies.scale import find_scale, read_seeds, with_settings
from altup.studies.study import Row, find_study, shipped
from altup.studies.tables import paper_numbers
from tests.studies.samples import read_study

MINIMAL = "title: T\nquestion: Q?\nrows:\n  Dense: {method: dense}\n  Wide: {method: altup, k: 2}\n"


def test_every_row_of_every_table_of_the_paper_belongs_to_one_study() -> None:
    """Found by comparing with the CSV files: nothing is forgotten, nothing told twice."""
    for name in paper.TABLES:
        rows = paper.table(name)
        covered = [row for study in shipped().values() if study.table == name for row in study.paper_rows()]
        assert sorted(map(str, covered)) == sorted(map(str, rows)), name


@pytest.mark.parametrize(
    "method", [*list_presets(), "recycled+moe", "altup+sequence-altup", "sum+stride-and-skip"]
)
def test_a_row_says_which_model_it_is_as_the_model_does(method: str) -> None:
    found, model = Row("R", {"method": method}).identity, AltUpT5Config.from_preset("small", method)
    assert (found["k"], found["stride"]) == (model.num_blocks, model.stride)


@pytest.mark.parametrize("study", shipped().values(), ids=lambda s: s.name)
def test_every_row_of_the_paper_has_a_model_of_ours(study) -> None:
    """One model, one row; the speedup table has a row for each of four benchmarks."""
    labels = [study.label_of(row) for row in study.paper_rows()]
    assert None not in labels
    assert set(labels) <= {row.label for row in study.rows}
    each = 4 if study.table == "speedup_at_equal_accuracy" else 1
    assert len(labels) == each * len(paper_numbers(study))


def test_the_papers_numbers_reach_our_measures_unchanged() -> None:
    sequence = paper_numbers(shipped()["sequence"])
    assert sequence["base", "Sequence-AltUp"]["accuracy"] == 65.39
    assert sequence["base", "Sequence-AltUp"]["relative_speed"] == pytest.approx(74.9 / 52.4)
    assert paper_numbers(shipped()["experts"])["large", "AltUp K=2 + experts"]["accuracy"] == 65.95
    assert paper_numbers(shipped()["size-matched"])["large", "Dense + 4 layers"] == {
        "superglue": 82.57,
        "relative_speed": 0.9,
    }
    assert paper_numbers(shipped()["bert"])["light", "AltUp K=2"] == {"accuracy": 56.2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sizez: {}", "did you mean 'sizes'"),
        ("measures: [acuracy]", "acuracy"),
        ("baseline: Dens", "Dens"),
        ("table: nothing", "nothing"),
        ("expect: [{better: Wide, than: Nobody}]", "Nobody"),
        ("expect: [{better: Wide, than: Dense, metric: steps}]", "of steps neither more nor less is better"),
        ("expect: [{better: Wide}]", "than"),
        ("expect: [{better: [], than: Dense}]", r"expect: better=\[\] is of the wrong kind"),
        ("rows: {Dense: 3}", "must hold fields"),
        ("title: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_study_are_named(tmp_path: Path, change: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL + change + "\n")
    with pytest.raises(UserError, match=words):
        find_study(str(path))


def test_a_study_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    study = find_study(str(path))
    assert study.name == "mine"
    assert [row.label for row in study.rows] == ["Dense", "Wide"]
    assert study.paper_rows() == []
    with pytest.raises(UserError, match="did you mean 'varying-k'"):
        find_study("varing-k")
    with pytest.raises(UserError, match="no such file"):
        find_study(str(tmp_path / "absent.yaml"))


def test_a_row_left_out_at_a_scale() -> None:
    study = read_study(
        MINIMAL + "  Deep: {method: dense, extra_layers: 4, at: {paper: null, smoke: {extra_layers: 1}}}"
    )
    row = study.row("Deep")
    assert row.settings_at("paper") is None
    assert row.settings_at("smoke") == {"method": "dense", "extra_layers": 1}
    assert row.settings_at("mini") == {"method": "dense", "extra_layers": 4}


def test_a_scale_of_your_own_is_swept_in_its_own_order(tmp_path: Path) -> None:
    """What it names comes before what it takes over."""
    path = tmp_path / "mine.yaml"
    path.write_text("like: mini\ntune: {grid: {weight_decay: [0, 0.1], lr: [0.03, 0.06]}}\n")
    tune, usual = find_scale(str(path)).tune, find_scale("mini").tune
    assert tune is not None
    assert usual is not None
    others = [name for name in usual.grid if name != "lr"]
    assert list(tune.grid) == ["weight_decay", "lr", *others]


def test_a_scale_of_your_own_takes_out_what_it_calls_null(tmp_path: Path) -> None:
    """A setting of the grid, with where its sweep begins; or all sweeps."""
    path = tmp_path / "mine.yaml"
    path.write_text("like: mini\ntune: {grid: {lr_factors.positions: null, lr_factors.vectors: null}}\n")
    tune, usual = find_scale(str(path)).tune, find_scale("mini").tune
    assert tune is not None
    assert usual is not None
    gone = {"lr_factors.positions", "lr_factors.vectors"}
    assert tune.grid == {name: values for name, values in usual.grid.items() if name not in gone}
    path.write_text("like: mini\ntune: null\n")
    assert find_scale(str(path)).tune is None


def test_null_takes_out_what_was_never_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("like: mini\npretrain: {lr_factors: {positions: null, vectors: 0.1}}\n")
    assert find_scale(str(path)).pretrain["lr_factors"] == {"vectors": 0.1}


def test_a_scale_between(tmp_path: Path) -> None:
    path = tmp_path / "longer.yaml"
    path.write_text("like: mini\npretrain: {steps: 9000}\nsizes: [base]\n")
    scale = find_scale(str(path))
    assert (scale.name, scale.base, scale.sizes) == ("longer", "mini", ["base"])
    assert scale.pretrain == {**find_scale("mini").pretrain, "steps": 9000}
    given = with_settings(scale, {"steps": 10, "finetune.steps": 3})
    assert given.name == "longer:finetune.steps=3,steps=10"
    assert given.given == {"steps": 10}
    assert given.columns["squad"].settings["steps"] == 3
    with pytest.raises(UserError, match="--only"):
        with_settings(scale, {"method": "altup"})
    path.write_text("like: huge\n")
    with pytest.raises(UserError, match="huge"):
        find_scale(str(path))
    path.write_text("stepz: 3\n")
    with pytest.raises(UserError, match="stepz"):
        find_scale(str(path))
    with pytest.raises(UserError, match="not known"):
        find_scale("huge")


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1.5"])
def test_seeds_are_whole_numbers(text: str) -> None:
    with pytest.raises(UserError):
        read_seeds(text)


def test_a_seed_counts_once() -> None:
    assert read_seeds("1,0,1") == [1, 0]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("seeds: 0", "seeds=0 is of the wrong kind; give a list of a whole number"),
        ("sizes: tiny", "sizes='tiny'"),
        ("pretrain: 5", "pretrain=5"),
        ("experts: many", "experts='many'"),
        ("finetune: [1]", "finetune=[1]"),
        ("finetune: {columns: {glue: 3}}", "column glue needs tasks"),
        ("finetune: {columns: {chess: {tasks: [squad]}}}", "'chess' is not known"),
    ],
)  # fmt: skip
def test_scales_of_the_wrong_kind_are_refused(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"like: smoke\n{lines}\n")
    with pytest.raises(UserError, match=re.escape(words)):
        find_scale(str(path))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("expect: 3", "expect=3"),
        ("measures: accuracy", "measures='accuracy' is of the wrong kind; give a list of text"),
        ("sizes: small", "sizes='small'"),
        ("settings: {smoke: 3}", "settings={'smoke': 3}"),
        ("settings: {smokey: {steps: 3}}", "'smokey' is not known"),
        ("equal_time: maybe", "'maybe' is not known"),
        ("equal_time: Dense\nequal_flops: Dense", "exclude each other"),
        (
            "rows: {Dense: {method: dense, time_of: X}, X: {method: sum, time_of: Dense}}",
            "which trains as another",
        ),
        ("finetune: [chess]", "'chess' is not known"),
        ("table: varying_k\nwhere: {colour: [1]}", "unknown key 'colour'"),
        ("table: varying_k", "no row describes model small, method altup, k 4"),
        ("rows: {Dense: {method: dense, at: 3}}", "row 'Dense': at=3"),
        ("rows: {Dense: {method: dense, at: {smokey: null}}}", "'smokey' is not known"),
        ("rows: {Dense: {method: dense, model_overrides: 3}}", "model_overrides=3"),
        ("rows: {Dense: {method: altup, start: {P: chaos}}}", "'chaos' is not known"),
        ("rows: [Dense]", "rows=['Dense']"),
    ],
)
def test_studies_of_the_wrong_kind_are_refused(lines: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        read_study(MINIMAL + lines, "mine")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("grid: {lr: [0.1]}", "tune has no steps"),
        ("steps: 3, grid: {lr_factors: [0.1]}", "name one of its entries"),
        ("steps: 3, grid: {lr.x: [0.1]}", "it has no entries"),
        ("steps: 3, grid: {lr: [0.1, 0.1]}", "give a list of different values"),
        ("steps: 3, grid: {speed: [1]}", "'speed' is not known"),
        ("steps: 3, grid: {lr: [0.1]}, start: {lr: 0.2}", "0.2 is not known"),
        ("steps: 3, grid: {lr: [0.1]}, search: random", "'random' is not known"),
        ("steps: 3, seed: 1, grid: {lr: [0.1]}", "seed 1 is that of the sweeps"),
    ],
)
def test_mistakes_in_a_sweep_are_named(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"like: smoke\nseeds: [1]\ntune: {{{lines}}}\n")
    with pytest.raises(UserError, match=re.escape(words)):
        find_scale(str(path))
