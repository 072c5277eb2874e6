"""The pages of results and of the evidence say what the results files say."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from altup.core.text import signed
from altup.studies.frontier import compare_speedups
from altup.studies.report import StudyReport
from altup.studies.statistics import Difference, Statistics, compare_means
from altup.studies.study import METRICS, Study, read_study
from altup.studies.sweep_figures import text_sweeps
from altup.studies.tables import PERCENT, show_interval

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
LABELS = {"dense": "Dense"}  # as the page names a model, where it does so in another way


def table_of(head: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `head`, on either page."""
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "evidence.md")]
    lines = "\n".join(pages).splitlines()
    first = 2 + next(i for i, line in enumerate(lines) if line.startswith(head))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last]]


def told_difference(found: Difference | None, metric: str) -> list[str]:
    """A difference and its interval as the page has them."""
    if found is None:
        return ["", ""]
    shown = f"{found.mean:+.{METRICS[metric].digits}f}".replace("-", "−")
    return [shown, show_interval(found, METRICS[metric])]


def told_with_interval(found: Difference | None) -> str:
    difference, interval = told_difference(found, "loss")
    return f"{difference} ({interval})"


def told_models(ours: tuple[str, float, float], theirs: tuple[str, float, float]) -> list[str]:
    """Seeds, steps and losses of two models."""
    seeds = ours[0] if ours[0] == theirs[0] else f"{ours[0]} / {theirs[0]}"
    losses = f"{METRICS['loss'].show(ours[2])} / {METRICS['loss'].show(theirs[2])}"
    return [seeds, f"{ours[1]:,.0f} / {theirs[1]:,.0f}", losses]


def told_row(study: Study, stats: Statistics, label: str, size: str, *metrics: str) -> list[str]:
    """A model's seeds, and of each metric its mean with the difference to dense and its interval."""
    told = [f"{len(stats.runs(study.name, label, size))}"]
    for metric in metrics:
        mean = stats.mean(study.name, label, size, metric)
        assert mean is not None
        found = stats.difference(study, size, metric, label, "Dense") if label != "Dense" else None
        told += [METRICS[metric].show(mean.mean), *told_difference(found, metric)]
    return told


def test_the_page_agrees_with_the_results() -> None:
    """Seeds, means, differences, intervals and verdicts of every model in its table."""
    report = StudyReport([RESULTS / "long"], "long", [str(BENCHMARKS / "four_models.yaml")])
    (study,), stats = report.studies, report.stats
    table = table_of("| width 256, 5,000 steps")
    assert [LABELS.get(row[0], row[0]) for row in table] == [row.label for row in study.rows]
    verdicts = {(v.claim.better, v.claim.than, v.claim.metric): v for v in stats.verdicts(study)}

    def told(label: str, metric: str) -> list[str]:
        mean = stats.mean(study.name, label, "tiny", metric)
        assert mean is not None
        found = verdicts.get((label, "Dense", metric))
        return [METRICS[metric].show(mean.mean), *told_difference(found and found.difference, metric)]

    for row in table:
        label = LABELS.get(row[0], row[0])
        count, lost = len(stats.runs(study.name, label, "tiny")), stats.collapsed(study.name, label, "tiny")
        assert row[1].startswith(f"{count}" + (f", {lost} collapsed" if lost else ""))
        assert row[2:8] == [*told(label, "loss"), *told(label, "accuracy")]
        words = [verdicts[label, "Dense", metric].word for metric in ("loss", "accuracy") if label != "Dense"]
        assert row[8] == ", ".join(words)


@pytest.mark.parametrize(
    ("results", "names", "size", "head", "metrics"),
    [
        (
            "desk",
            "desk_decoder desk_methods desk_coefficients",
            "tiny",
            "| decoder, width 64, 1,200 steps",
            ["loss"],
        ),
        ("decoder", "decoder_methods decoder_more", "small", "| decoder, width 256, 3,000", ["loss", "accuracy"]),
        ("desk_t5", "desk_t5_models", "tiny", "| T5, width 64, 1,500 steps", ["loss", "accuracy"]),
        ("t5", "t5_models", "tiny", "| T5, width 256, 3,000 steps", ["loss", "accuracy"]),
    ],
)
def test_the_page_agrees_with_the_results_of_some_studies(
    results: str, names: str, size: str, head: str, metrics: list[str]
) -> None:
    """Seeds, means, differences, intervals and verdicts, of some studies in one table."""
    report = StudyReport(
        [RESULTS / results], results, [str(BENCHMARKS / f"{name}.yaml") for name in names.split()]
    )
    stats, table = report.stats, {name: told for name, *told in table_of(head)}
    seen = set()
    for study in report.studies:
        words = {v.claim.better: v.word for v in stats.verdicts(study) if v.claim.than == "Dense"}
        words |= {v.claim.than: v.word for v in stats.verdicts(study) if v.claim.better == "Dense"}
        for row in (row for row in study.rows if stats.sizes(study.name, row.label)):
            (name,) = [name for name in table if name.split(" (")[0].lower() == row.label.lower()]
            wanted = told_row(study, stats, row.label, size, *metrics)
            assert table[name] == [*wanted, words.get(row.label, "")]
            seen.add(name)
    assert seen == set(table)


def test_no_model_is_shown_with_the_sweep_of_another() -> None:
    """That is called the same and learns its coefficients."""
    report = StudyReport([RESULTS / "desk"], "desk", [str(BENCHMARKS / "desk_coefficients.yaml")])
    (study,) = report.studies
    assert "the runs:" not in text_sweeps(report.sweeps(study))


def test_the_page_agrees_with_the_results_by_depth() -> None:
    """Seeds, speeds, losses and accuracies."""
    report = StudyReport([RESULTS / "desk"], "desk", [str(BENCHMARKS / "desk_frontier.yaml")])
    (study,), stats = report.studies, report.stats
    for row, (name, *told) in zip(study.rows, table_of("| decoder, width 64, by depth"), strict=True):
        assert name.lower() == row.label.lower()
        means = {m: stats.mean(study.name, row.label, "tiny", m) for m in ("relative_speed", "loss", "accuracy")}
        shown = [METRICS[metric].show(mean.mean) for metric, mean in means.items() if mean is not None]
        assert told == [f"{len(stats.runs(study.name, row.label, 'tiny'))}", *shown]


@pytest.mark.parametrize(
    ("results", "study_file", "size", "head"),
    [
        ("bert", "bert_models.yaml", "light", "| BERT, width 256 | seeds"),
        (
            "desk_once",
            "desk_once_depth.yaml",
            "tiny, 19,200 steps",
            "| decoder, width 64, the time spent otherwise",
        ),
        ("desk_once", "desk_once_continuing.yaml", "tiny, 4,800 steps", "| decoder, width 64, going on"),
        ("desk_bert", "desk_bert_models.yaml", "tiny", "| BERT, width 64 | seeds"),
        ("desk_norms", "desk_decoder.yaml", "tiny", "| decoder, width 64, norms' rate swept"),
        (
            "desk_t5_shorter",
            "desk_t5_shorter_models.yaml",
            "tiny, 1,500 steps",
            "| T5, width 64, every fourth token",
        ),
        ("desk_t5_longer", "desk_t5_longer_models.yaml", "tiny", "| T5, width 64, three times as long"),
        (
            "decoder_once",
            "decoder_once_depth.yaml",
            "small, 5,000 steps",
            "| decoder, width 256, the time spent otherwise",
        ),
        ("t5", "t5_lengths.yaml", "tiny, 3,000 steps", "| T5, width 256, equal time"),
        (
            "decoder_once",
            "decoder_once_continuing.yaml",
            "small, 2,500 steps",
            "| decoder, width 256, going on",
        ),
        ("decoder_once", "decoder_once_frontier.yaml", "small", "| decoder, width 256, speed and quality"),
        (
            "bert_longer",
            "bert_longer_runs.yaml",
            "light, 12,000 steps",
            "| BERT, width 256, three times as long | seeds",
        ),
    ],
)
def test_the_page_agrees_in_equal_steps_and_time(results: str, study_file: str, size: str, head: str) -> None:
    """Seeds, speeds, steps, losses, accuracies, differences and intervals."""
    report = StudyReport([RESULTS / results], results, [str(BENCHMARKS / study_file)])
    (study,), stats = report.studies, report.stats
    rows = [row for row in study.rows if stats.sizes(study.name, row.label)]
    for row, (name, *told) in zip(rows, table_of(head), strict=True):
        assert name.lower() == row.label.lower()
        seeds, *wanted = told_row(study, stats, row.label, size, "loss", "accuracy")
        speed, steps = (stats.mean(study.name, row.label, size, m) for m in ("relative_speed", "steps"))
        assert speed is not None
        assert steps is not None
        assert told == [seeds, METRICS["relative_speed"].show(speed.mean), f"{steps.mean:,.0f}", *wanted]


def test_the_page_agrees_with_speedups_at_equal_score() -> None:
    report = StudyReport(
        [RESULTS / "decoder_once"], "decoder_once", [str(BENCHMARKS / "decoder_once_frontier.yaml")]
    )
    found = {
        (row.label, row.benchmark): row.ours["training"]
        for row in compare_speedups(report.studies[0], report.stats)
    }
    rows = table_of("| speedup at equal score, % |")
    assert [row[0] for row in rows] == ["dense, at 0.06", "AltUp K=2", "Recycled K=2", "AltUp K=4"]
    for label, *told in rows:
        wanted = []
        for score in ("accuracy", "loss"):
            speedup = found[label.replace("dense", "Dense"), score]
            assert isinstance(speedup, Difference)
            wanted += [signed(speedup.mean, 1), show_interval(speedup, PERCENT)]
        assert told == wanted


def test_the_page_agrees_with_the_results_of_small_models() -> None:
    """Seeds, losses, SQuAD with differences and intervals, and the scores of every other task."""
    report = StudyReport([RESULTS / "small"], "small", [str(BENCHMARKS / "small_models.yaml")])
    (study,), stats = report.studies, report.stats
    scores: dict[tuple[str, str, str], list[float]] = {}
    for path in (RESULTS / "small" / "runs").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        method = record["title"].split()[1]
        for task, metrics in record.get("tasks", {}).items():
            for metric, score in metrics.items():
                scores.setdefault((method, task, metric), []).append(score)
    others = [("squad", "exact_match"), *((f"glue/{t}", m) for t, m in (
        ("sst2", "accuracy"), ("mrpc", "f1"), ("mrpc", "accuracy"), ("rte", "accuracy"),
    ))]  # fmt: skip
    for row, (name, *told) in zip(study.rows, table_of("| the paper's small, 3,500 steps"), strict=True):
        assert name.lower() == row.label.lower()
        wanted = told_row(study, stats, row.label, "small", "loss", "squad_f1")
        method = row.label.split()[0].lower()
        assert told == [*wanted, *(f"{fmean(scores[method, *other]):.2f}" for other in others)]


@pytest.mark.parametrize(
    ("results", "study_file", "head"),
    [
        ("desk_high", "desk_high_rates.yaml", "| decoder, width 64, at a high rate"),
        ("desk_deep", "desk_deep_norms.yaml", "| decoder, width 64, six layers at 0.18"),
    ],
)
def test_the_page_agrees_with_the_results_at_high_rates(results: str, study_file: str, head: str) -> None:
    """Seeds that trained and that collapsed, and losses."""
    report = StudyReport([RESULTS / results], results, [str(BENCHMARKS / study_file)])
    (study,), stats = report.studies, report.stats
    rows = [row for row in study.rows if stats.sizes(study.name, row.label)]
    for row, (name, *told) in zip(rows, table_of(head), strict=True):
        assert name.lower() == row.label.lower()
        lost = stats.collapsed(study.name, row.label, "tiny")
        mean = stats.mean(study.name, row.label, "tiny", "loss")
        shown = (
            ["0", f"{lost}", ""] if mean is None else [f"{mean.seeds}", f"{lost}", METRICS["loss"].show(mean.mean)]
        )
        assert told == shown


@pytest.mark.parametrize(
    ("results", "scale", "study_file", "name", "wide", "than"),
    [
        ("desk_once", "desk_once", "desk_once_lengths.yaml", "decoder, width 64", "AltUp K=2", "Dense"),
        (
            "desk_once",
            "desk_once",
            "desk_once_longer.yaml",
            "decoder, width 64, twice as long",
            "AltUp K=2",
            "Dense",
        ),
        (
            "desk_once",
            "desk_once",
            "desk_once_short.yaml",
            "norms tuned, rates of 4,800 steps",
            "AltUp K=2",
            "Dense",
        ),
        (
            "desk_once",
            "desk_once",
            "desk_once_short.yaml",
            "fast norms, the same text",
            "AltUp K=2, fast norms",
            "Dense, fast norms",
        ),
        (
            "desk_once",
            "desk_once",
            "desk_once_recycled.yaml",
            "Recycled, norms tuned",
            "Recycled K=2",
            "Dense",
        ),
        ("desk_longer", "desk_longer", "desk_decoder_longer.yaml", "norms not tuned", "AltUp K=2", "Dense"),
        ("desk_longer", "desk_longer", "desk_decoder_longer.yaml", "held", "AltUp K=2, held", "Dense"),
        ("desk_longer", "desk_longer", "desk_decoder_longer.yaml", "K=4", "AltUp K=4", "Dense"),
        ("decoder", "decoder", "decoder_lengths.yaml", "decoder, width 256", "AltUp K=2", "Dense"),
        (
            "decoder",
            "decoder_longer",
            "decoder_longer_runs.yaml",
            "embeddings × 4",
            "AltUp K=2",
            "Dense",
        ),
        (
            "decoder_steady",
            "decoder_steady",
            "decoder_steady_lengths.yaml",
            "both with slow norms",
            "AltUp K=2",
            "Dense",
        ),
        ("desk_much_text", "desk_longer", "desk_repeated_text.yaml", "much text", "AltUp K=2", "Dense"),
        ("desk_little_text", "desk_longer", "desk_repeated_text.yaml", "little text", "AltUp K=2", "Dense"),
        (
            "desk_little_text",
            "desk_longer",
            "desk_repeated_text.yaml",
            "little text, dropout 0.1",
            "AltUp K=2, dropout 0.1",
            "Dense, dropout 0.1",
        ),
        (
            "decoder_once",
            "decoder_once",
            "decoder_once_lengths.yaml",
            "decoder, width 256, text read once",
            "AltUp K=2",
            "Dense",
        ),
        ("bert", "bert", "bert_models.yaml", "BERT, width 256", "AltUp K=2", "Dense, AltUp's time"),
        (
            "bert_norms",
            "bert_norms",
            "bert_norms_models.yaml",
            "BERT, width 256, norms tuned",
            "AltUp K=2",
            "Dense, AltUp's time",
        ),
        ("desk_bert", "desk_bert", "desk_bert_models.yaml", "BERT, width 64", "AltUp K=2", "Dense, AltUp's time"),
        ("long", "long", "equal-time", "T5, width 256, slow positions", "AltUp K=2", "Dense"),
        ("t5", "t5", "t5_lengths.yaml", "T5, width 256", "AltUp K=2", "Dense"),
        ("t5", "t5", "t5_lengths.yaml", "T5, width 256, Recycled", "Recycled K=2", "Dense"),
        ("t5", "t5", "t5_lengths.yaml", "T5, width 256, Sequence-AltUp", "Sequence-AltUp", "Dense"),
        (
            "decoder_once_short",
            "decoder_once_short",
            "decoder_once_short_runs.yaml",
            "decoder, width 256, rates of 625 steps",
            "AltUp K=2",
            "Dense",
        ),
        (
            "desk_once_1200",
            "desk_once_1200",
            "desk_once_1200_runs.yaml",
            "decoder, width 64, rates of 1,200 steps",
            "AltUp K=2",
            "Dense",
        ),
        (
            "desk_once_1200",
            "desk_once_1200",
            "desk_once_1200_runs.yaml",
            "decoder, width 64, rates of 1,200 steps, Recycled",
            "Recycled K=2",
            "Dense",
        ),
        (
            "bert_longer",
            "bert_longer",
            "bert_longer_runs.yaml",
            "BERT, width 256, three times as long",
            "AltUp K=2",
            "Dense",
        ),
        (
            "decoder_once",
            "decoder_once",
            "decoder_once_lengths.yaml",
            "decoder, width 256, text read once, Recycled",
            "Recycled K=2",
            "Dense",
        ),
        (
            "desk_t5_longer",
            "desk_t5_longer",
            "desk_t5_longer_models.yaml",
            "T5, width 64, Sequence-AltUp",
            "Sequence-AltUp",
            "Dense",
        ),
    ],
)
def test_the_page_agrees_with_equal_time(
    results: str, scale: str, study_file: str, name: str, wide: str, than: str
) -> None:
    """Seeds, steps, losses, differences, intervals and verdicts of each length."""
    given = str(BENCHMARKS / study_file) if study_file.endswith(".yaml") else study_file
    report = StudyReport([RESULTS / results], scale, [given])
    (study,), stats = report.studies, report.stats
    claimed = (wide, than, "loss")
    words = {
        v.size: v.word for v in stats.verdicts(study) if (v.claim.better, v.claim.than, v.claim.metric) == claimed
    }
    sizes = [size for size in stats.sizes_of(study) if size in words]
    tables = [
        row
        for head in (", other lengths", "", ", by text", ", width 256", ", width 64")
        for row in table_of(f"| equal time{head} | ")
    ]
    lines = [told for of, *told in tables if of == name]
    assert lines
    for size, told in zip(sizes, lines, strict=True):
        models = []
        for label in (wide, than):
            count, lost = len(stats.runs(study.name, label, size)), stats.collapsed(study.name, label, size)
            steps, loss = (stats.mean(study.name, label, size, metric) for metric in ("steps", "loss"))
            assert steps is not None
            assert loss is not None
            models.append((f"{count}, {lost} collapsed" if lost else f"{count}", steps.mean, loss.mean))
        found = stats.difference(study, size, "loss", wide, than)
        assert told == [*told_models(*models), told_with_interval(found), words[size]]


@pytest.mark.parametrize(
    ("study_file", "results"),
    [
        ("decoder_once_depth.yaml", "decoder_speeds_h200.csv"),
        ("decoder_once_lengths.yaml", "decoder_speeds_h200.csv"),
        ("decoder_once_continuing.yaml", "decoder_speeds_h200.csv"),
        ("decoder_once_short_runs.yaml", "decoder_speeds_h200.csv"),
        ("decoder_once_frontier.yaml", "decoder_once/decoder_once_frontier.csv"),
        ("bert_longer_runs.yaml", "bert"),
        ("desk_once_longer.yaml", "desk_once"),
        ("desk_once_1200_runs.yaml", "desk_once"),
        ("desk_t5_longer_models.yaml", "desk_t5_longer"),
    ],
)
def test_speeds_of_a_study_are_those_that_were_measured(study_file: str, results: str) -> None:
    """By the decoders' own file or by the results of a scale. At what rate and how long a dense model trains says
    nothing about its speed."""
    measured: dict[str, float] = {}
    for path in (RESULTS / results).glob("*.csv") if (RESULTS / results).is_dir() else [RESULTS / results]:
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            if "model" in row:
                measured[row["model"]] = float(row["relative"])
            elif row["metric"] == "relative_speed":
                measured[row["label"]] = float(row["value"])
    told = read_study(study_file, (BENCHMARKS / study_file).read_text(encoding="utf-8"), study_file).speeds
    assert told
    for label, speed in told.items():
        model = re.sub(r"^Before$|^Dense, (at 0\.06|\w+'s time)$", "Dense", label)
        assert speed == pytest.approx(measured[model], abs=1e-4), label


def test_the_page_agrees_with_each_model_at_its_better_norms() -> None:
    """AltUp with slow ones, dense with fast ones, for 12,000 steps of AltUp."""
    found = {}
    for results, name, label in (
        ("decoder_steady", "decoder_steady_lengths", "AltUp K=2"),
        ("decoder", "decoder_lengths", "Dense"),
    ):
        report = StudyReport([RESULTS / results], results, [str(BENCHMARKS / f"{name}.yaml")])
        places = (name, label, "small, 12,000 steps")
        found[label] = report.stats.values(*places, "loss"), report.stats.values(*places, "steps")[0]
    ours, theirs = ((f"{len(losses)}", steps, fmean(losses)) for losses, steps in found.values())
    difference = compare_means(*(losses for losses, _ in found.values()))
    wanted = [*told_models(ours, theirs), told_with_interval(difference), "reproduced"]
    assert difference.high is not None
    assert difference.high < 0
    assert [row[1:] for row in table_of("| equal time | ") if "AltUp with slow norms" in row[0]] == [wanted]
