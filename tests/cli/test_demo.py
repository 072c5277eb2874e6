"""`altup demo` as a user meets it, at its shortest: two steps a model."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from tests.processes import altup
from tests.training.compare import records, weights

STEPS = 2
RUNS = {"dense": "Dense", "altup": "AltUp K=2", "recycled": "Recycled K=2"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
VOID = {"meta", "br", "hr", "img", "input", "link"}


def demo(out: Path, steps: int = STEPS) -> Result:
    """In this process: what it imports is there already."""
    return CliRunner().invoke(app, ["demo", "--out", str(out), "--steps", str(steps)])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("demo") / "out"
    result = demo(out)
    assert result.exit_code == 0, result.stderr
    return out, result


@pytest.fixture(scope="module")
def report(done: tuple[Path, Any]) -> str:
    return (done[0] / "report.html").read_text(encoding="utf-8")


def folder(out: Path, method: str) -> Path:
    return out / "runs" / f"{method}-{STEPS}-steps-seed-0"


def last(out: Path, method: str) -> dict[str, Any]:
    return [r for r in records(folder(out, method)) if r["split"] == "validation"][-1]


def test_the_table_says_what_the_runs_recorded(done: tuple[Path, Any]) -> None:
    out, result = done
    dense = last(out, "dense")
    for method, name in RUNS.items():
        row = next(line for line in result.stdout.splitlines() if f"│ {name} " in line)
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        found = last(out, method)
        assert cells[1] == f"{found['accuracy']:.2%}"
        assert cells[3] == f"{found['loss']:.4f}"
        if method != "dense":
            points = float(cells[2].removesuffix(" points").replace("−", "-"))
            assert points == pytest.approx(100 * (found["accuracy"] - dense["accuracy"]), abs=0.0051)
            assert float(cells[4].replace("−", "-")) == pytest.approx(found["loss"] - dense["loss"], abs=0.000051)
    assert str(out / "report.html") in result.stdout


def test_parameters_are_those_of_the_saved_models(done: tuple[Path, Any]) -> None:
    out, result = done
    for method, name in RUNS.items():
        tensors = weights(folder(out, method))
        tables = sum(t.numel() for n, t in tensors.items() if "embed_tokens" in n or "lm_head" in n)
        others = sum(t.numel() for t in tensors.values()) - tables
        row = next(line for line in result.stdout.splitlines() if f"│ {name} " in line)
        assert [cell.strip() for cell in row.split("│")[-3:-1]] == [f"{tables:,}", f"{others:,}"]


def test_all_three_saw_the_same_and_differ_in_method_alone(done: tuple[Path, Any]) -> None:
    import yaml

    configs = [yaml.safe_load((folder(done[0], method) / "config.yaml").read_text()) for method in RUNS]
    for config in configs:
        config.pop("method")
        config.pop("k")
    assert configs[0] == configs[1] == configs[2]


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open; collects attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.hover: list[dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
                self.loads.append(f"{tag} {name}={value}")
            if name == "data-hover":
                self.hover.append(json.loads(value or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_the_report_stands_alone(report: str) -> None:
    parser = Balanced()
    parser.feed(report)
    parser.close()
    assert parser.open == []
    assert parser.loads == []
    assert not re.search(r"https?://|@import|url\(|<link|<iframe|fetch\(|XMLHttpRequest", report)
    assert "prefers-color-scheme: dark" in report


def test_the_report_shows_every_run_with_its_numbers(done: tuple[Path, Any], report: str) -> None:
    out, _ = done
    for method, name in RUNS.items():
        found = last(out, method)
        row = re.search(rf"{re.escape(name)}</th>(.*?)</tr>", report)
        assert row, name
        cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row[1])]
        assert cells[0] == f"{found['accuracy']:.2%}"
        assert cells[2] == f"{found['loss']:.4f}"
        assert str(folder(out, method)) in report


def test_the_curves_are_those_of_metrics_jsonl(done: tuple[Path, Any], report: str) -> None:
    parser = Balanced()
    parser.feed(report)
    loss, accuracy, training, in_time = parser.hover
    for chart, split, field, form in (
        (accuracy, "validation", "accuracy", lambda v: f"{100 * v:.1f} %"),
        (loss, "validation", "loss", "{:.2f}".format),
        (training, "train", "loss", "{:.2f}".format),
    ):
        for method, line in zip(RUNS, chart["series"], strict=True):
            recorded = [r for r in records(folder(done[0], method)) if r["split"] == split]
            assert [(p[2], p[3]) for p in line["points"]] == [(str(r["step"]), form(r[field])) for r in recorded]
    assert [line["name"] for line in in_time["series"]] == ["Dense", "AltUp", "Recycled"]


def test_the_coefficients_are_those_of_the_final_models(done: tuple[Path, Any], report: str) -> None:
    maps = re.findall(r'<table class="heat">.*?</table>', report, re.DOTALL)
    for method, shown in zip(("altup", "recycled"), maps, strict=True):
        tensors = weights(folder(done[0], method))
        rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", shown)
        assert len(rows) == 4
        for i, (name, cells) in enumerate(rows):
            stack, layer = ("encoder", i) if i < 2 else ("decoder", i - 2)
            assert name == f"{stack} {layer + 1} · block {layer % 2 + 1}"
            P, g = (tensors[f"{stack}.rule.updates.{layer}.{which}"] for which in "Pg")
            values = [float(v.replace("−", "-")) for v in re.findall(r">([^<]+)</td>", cells)]
            assert values == pytest.approx([*P.flatten().tolist(), *g.tolist()], abs=0.00501)


def test_running_it_again_repeats_nothing(done: tuple[Path, Any]) -> None:
    out, first = done
    kept = [*out.glob("runs/*/final/model.safetensors"), *out.glob("runs/*/metrics.jsonl"), out / "speed.json"]
    assert len(kept) == 7
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in kept}
    again = demo(out)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("finished before, reused") == 3
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in kept} == before
    assert again.stdout == first.stdout


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seed", "-1"]])
def test_mistakes_get_one_clear_line(tmp_path: Path, arguments: list[str]) -> None:
    code, text = altup(tmp_path / "said.txt", "demo", "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert "makes no sense" in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_stopped_with_control_c_it_goes_on(done: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0] / "data", out / "data")
    command = [sys.executable, "-m", "altup", "demo", "--out", out, "--steps", "6"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    for line in process.stderr:
        if "altup tiny" in line:
            break
    for line in process.stderr:
        if "step 1/6" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 75
    assert "Run the same command again to go on" in rest
    assert "Traceback" not in rest
    result = demo(out, steps=6)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("finished before, reused") == 1
    assert "resuming from" in result.stderr
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_real_browser_shows_it(done: tuple[Path, Any], report: str, tmp_path: Path) -> None:
    """Chromium runs the script without an error, and pointing at a chart shows the values there."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    point = (
        "<script>for (const svg of document.querySelectorAll('svg[data-hover]')) {"
        "const box = svg.getBoundingClientRect();"
        "const place = {clientX: box.left + box.width * 0.8, clientY: box.top + 50};"
        "svg.dispatchEvent(new PointerEvent('pointermove', place));"
        "}</script>"
    )
    copy = tmp_path / "report.html"
    copy.write_text(report.replace("</body>", point + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [browser, *flags, "--enable-logging=stderr", "--dump-dom", f"file://{copy}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Uncaught" not in shown.stderr
    tips = re.findall(r'<div class="tip"(.*?)>(.*?)</div></div>', shown.stdout)
    assert len(tips) == 4
    for attributes, content in tips:
        assert "hidden" not in attributes
        for name in ("Dense", "AltUp", "Recycled"):
            assert name in content
    assert f"{100 * last(done[0], 'altup')['accuracy']:.1f} %" in tips[1][1]
    for scheme, background in (("1", (255, 255, 255)), ("0", (20, 21, 23))):
        picture = tmp_path / f"{scheme}.png"
        subprocess.run(
            [browser, *flags, "--hide-scrollbars", f"--blink-settings=preferredColorScheme={scheme}",
             "--window-size=1200,2400", f"--screenshot={picture}", f"file://{copy}"],
            capture_output=True, check=True, timeout=120,
        )  # fmt: skip
        from matplotlib.image import imread

        pixels = imread(picture)
        assert tuple((pixels[3, 3, :3] * 255).round().astype(int)) == background
        assert len({tuple(c) for c in pixels[::7, ::7, :3].reshape(-1, 3)}) > 20


@pytest.mark.parametrize("name", ["report.html", "notes.txt"])
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    result = demo(tmp_path)
    assert isinstance(result.exception, UserError)
    assert name in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_report_of_one_s_own_beside_a_demo_is_left_alone(done: tuple[Path, Result], tmp_path: Path) -> None:
    out = shutil.copytree(done[0], tmp_path / "out")
    (out / "report.html").write_text("mine")
    assert "report.html is not of a demo" in str(demo(out).exception)
    assert (out / "report.html").read_text() == "mine"
    (out / "report.html").unlink()
    (out / "speed.json").write_text("[]")
    assert "speed.json is not of a demo" in str(demo(out).exception)
