"""The page of results says what its results files say."""

from __future__ import annotations

from pathlib import Path

from altup.studies.report import StudyReport
from altup.studies.statistics import Verdict
from altup.studies.study import METRICS
from altup.studies.tables import show_interval

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"dense": "Dense"}  # as the page names a model, where it does so in another way


def test_the_page_agrees_with_the_results() -> None:
    """Seeds, means, differences, intervals and verdicts of every model in its table."""
    report = StudyReport(
        [ROOT / "benchmarks" / "results" / "long"], "long", [str(ROOT / "benchmarks" / "four_models.yaml")]
    )
    (study,), stats = report.studies, report.stats
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| width 256, 5,000 steps"))
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[head + 2 :][: len(study.rows)]
    ]
    assert [LABELS.get(row[0], row[0]) for row in table] == [row.label for row in study.rows]
    verdicts = {(v.claim.better, v.claim.than, v.claim.metric): v for v in stats.verdicts(study)}

    def told(label: str, metric: str) -> list[str]:
        mean = stats.mean(study.name, label, "tiny", metric)
        assert mean is not None
        found: Verdict | None = verdicts.get((label, "Dense", metric))
        if found is None or found.difference is None:
            return [METRICS[metric].show(mean.mean), "", ""]
        difference = show_interval(found.difference, METRICS[metric])
        shown = f"{found.difference.mean:+.{METRICS[metric].digits}f}".replace("-", "−")
        return [METRICS[metric].show(mean.mean), shown, difference]

    for row in table:
        label = LABELS.get(row[0], row[0])
        count, lost = len(stats.runs(study.name, label, "tiny")), stats.collapsed(study.name, label, "tiny")
        assert row[1].startswith(f"{count}" + (f", {lost} collapsed" if lost else ""))
        assert row[2:8] == [*told(label, "loss"), *told(label, "accuracy")]
        words = [verdicts[label, "Dense", metric].word for metric in ("loss", "accuracy") if label != "Dense"]
        assert row[8] == ", ".join(words)


def test_the_page_agrees_with_the_results_of_the_decoder() -> None:
    """Seeds, losses, differences, intervals and verdicts."""
    report = StudyReport(
        [ROOT / "benchmarks" / "results" / "desk"], "desk", [str(ROOT / "benchmarks" / "desk_decoder.yaml")]
    )
    (study,), stats = report.studies, report.stats
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| decoder, width 64"))
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[head + 2 :][: len(study.rows)]
    ]
    words = {v.claim.better: v.word for v in stats.verdicts(study) if v.claim.than == "Dense"}
    for row, (name, *told) in zip(study.rows, table, strict=True):
        assert name.lower().startswith(row.label.lower())
        mean = stats.mean(study.name, row.label, "tiny", "loss")
        assert mean is not None
        wanted = [f"{len(stats.runs(study.name, row.label, 'tiny'))}", METRICS["loss"].show(mean.mean), "", "", ""]
        if row.label != "Dense":
            found = stats.difference(study, "tiny", "loss", row.label, "Dense")
            assert found is not None
            shown = f"{found.mean:+.3f}".replace("-", "−")
            wanted[2:] = [shown, show_interval(found, METRICS["loss"]), words.get(row.label, "")]
        assert told == wanted
