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
from math import hypot
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from altup.cli.main import app
from altup.core.errors import UserError
from altup.data.embedded import documents
from altup.studies.demo import Demo, to_its_end
from tests.processes import PATIENCE, altup
from tests.training.compare import records, weights

STEPS = 2
RUNS = {"dense": "Dense", "altup": "AltUp K=2", "recycled": "Recycled K=2"}  # by method, which names folders
SEEDS = (0, 1)
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


def folder(out: Path, method: str, seed: int = 0) -> Path:
    (found,) = out.glob(f"runs/decoder-tiny-{method}-*{STEPS}-steps-seed-{seed}-*")
    return found


def finals(out: Path, method: str, name: str) -> list[float]:
    """One number a seed."""
    return [
        [r for r in records(folder(out, method, seed)) if r["split"] == "validation"][-1][name] for seed in SEEDS
    ]


def shown(report: str) -> dict[str, list[str]]:
    """The cells of the report's first table, by model."""
    body = re.search(r"<tbody>(.*?)</tbody>", report[report.index('<section id="demo">') :], re.DOTALL)
    assert body
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)
    ]
    return {row[0].removeprefix("tiny · "): row[1:] for row in rows}


def number(text: str) -> float:
    return float(text.split()[0].replace("−", "-").replace(",", ""))


def test_the_table_says_what_the_runs_recorded(done: tuple[Path, Any], report: str) -> None:
    out, result = done
    told = [
        line
        for line in result.stdout.splitlines()
        if not line.startswith(("•", "  altup")) and str(out) not in line
    ]
    assert max(map(len, told)) <= 80
    table, dense = shown(report), finals(out, "dense", "loss")
    for method, label in RUNS.items():
        losses = finals(out, method, "loss")
        seeds, loss, accuracy, *_ = table[label]
        assert seeds == "2"
        assert number(loss) == pytest.approx(mean(losses), abs=0.00051)
        assert number(accuracy) == pytest.approx(100 * mean(finals(out, method, "accuracy")), abs=0.0051)
        assert loss.partition("<small>")[0] in result.stdout
        if method != "dense":
            gain, _, error = loss.partition("<small>")[2].removesuffix("</small>").partition(" ± ")
            assert number(gain) == pytest.approx(mean(losses) - mean(dense), abs=0.00051)
            of_two = hypot(*(abs(a - b) / 2 for a, b in (losses, dense)))  # of two seeds: half their distance
            assert float(error) == pytest.approx(of_two, abs=0.00051)


def test_the_noise_is_said_beside_the_difference(done: tuple[Path, Any]) -> None:
    claims = [f"• {part}" for part in " ".join(done[1].stdout.split()).split("• ")[1:]]
    assert len(claims) == 2
    for line, label in zip(claims, list(RUNS.values())[1:], strict=True):
        assert line.startswith(f"• {label} better than Dense, held-out loss, tiny: ")
        low, high = re.search(r"95 % interval (\S+) to (\S+), 2 seeds each", line).groups()
        is_open = "no significant difference" in line
        assert is_open == (number(low) <= 0 <= number(high))


def test_every_model_goes_on_with_the_same_sentences(done: tuple[Path, Any], report: str) -> None:
    """Sentences of held-out documents, of which no model has seen a word."""
    out, result = done
    the_demo = Demo(out, STEPS)
    held_out = [text for text in documents() if the_demo.recipe.held_out(text)]
    found = the_demo.continuations
    assert len(found) == 4
    text = " ".join(result.stdout.split())
    for one in found:
        assert any(document.startswith(f"{one.begin} {one.truth}") for document in held_out)
        assert f"{one.begin} … the text {one.truth}" in text
        assert html.escape(one.begin, quote=False) in html.unescape(report)
        assert list(one.by_model) == list(RUNS.values())
        for written in one.by_model.values():
            assert html.escape(written) in report or written in html.unescape(report)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (" the file. Return it. Re", "the file."),
        (" version 3.11 of a", "version 3.11 of a …"),
        (" done.", "done."),
        ("  ", ""),
    ],
)
def test_a_continuation_is_shown_to_the_end_of_its_sentence(written: str, shown: str) -> None:
    assert to_its_end(written) == shown


def test_the_last_lines_say_what_to_do_next(done: tuple[Path, Any], tmp_path: Path) -> None:
    import shlex

    *_, generate, prepare, pretrain = done[1].stdout.splitlines()
    assert prepare.split()[:2] == ["altup", "prepare"]
    assert pretrain.split()[:2] == ["altup", "pretrain"]
    tried = CliRunner().invoke(app, shlex.split(generate)[1:])
    assert tried.exit_code == 0, tried.output
    assert Demo(done[0], STEPS).sentences()[0][0] in tried.output


def test_parameters_are_those_of_the_saved_models(done: tuple[Path, Any], report: str) -> None:
    out, _ = done
    table = shown(report)
    for method, label in RUNS.items():
        tensors = weights(folder(out, method))
        tables = sum(t.numel() for n, t in tensors.items() if "embed_tokens" in n or "lm_head" in n)
        others = sum(t.numel() for t in tensors.values()) - tables
        assert table[label][-2:] == [f"{tables:,}", f"{others:,}"]


def test_all_saw_the_same_and_differ_in_method_and_seed_alone(done: tuple[Path, Any]) -> None:
    import yaml

    for seed in SEEDS:
        configs = [yaml.safe_load((folder(done[0], method, seed) / "config.yaml").read_text()) for method in RUNS]
        for config in configs:
            config.pop("method")
            config.pop("k")
            assert config["eval_part"] == "reporting"  # the recipe was chosen on the other half
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
    assert all(load.startswith("a href=#") for load in parser.loads)
    assert not re.search(r"https?://|@import|url\(|<link|<iframe|fetch\(|XMLHttpRequest", report)
    assert "prefers-color-scheme: dark" in report


def test_the_curves_are_the_means_of_metrics_jsonl(done: tuple[Path, Any], report: str) -> None:
    parser = Balanced()
    parser.feed(report)
    loss, accuracy = parser.hover
    for chart, field, form in (
        (accuracy, "accuracy", lambda v: f"{100 * v:.1f}"),
        (loss, "loss", "{:.2f}".format),
    ):
        for method, line in zip(RUNS, chart["series"], strict=True):
            of_seeds = [
                [r for r in records(folder(done[0], method, seed)) if r["split"] == "validation"] for seed in SEEDS
            ]
            means = [mean(r[field] for r in at) for at in zip(*of_seeds, strict=True)]
            assert [p[3] for p in line["points"]] == [form(value) for value in means]
        assert [line["name"] for line in chart["series"]] == list(RUNS.values())


def test_the_coefficients_are_those_of_the_final_models(done: tuple[Path, Any], report: str) -> None:
    maps = re.findall(r'<table class="heat">.*?</table>', report, re.DOTALL)
    for method, shown in zip(("altup", "recycled"), maps, strict=True):
        tensors = weights(folder(done[0], method))
        rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", shown)
        assert len(rows) == 2
        for layer, (name, told) in enumerate(rows):
            assert name.endswith(f"{layer + 1} · block {layer % 2 + 1}")
            P, g = (
                next(t for n, t in tensors.items() if n.endswith(f"rule.updates.{layer}.{which}"))
                for which in "Pg"
            )
            values = [float(v.replace("−", "-")) for v in re.findall(r">([^<]+)</td>", told)]
            assert values == pytest.approx(
                [*P.flatten().tolist(), *g.tolist()], abs=0.0051
            )  # shown with two digits of four


def test_running_it_again_repeats_nothing(done: tuple[Path, Any]) -> None:
    out, first = done
    kept = [p for name in ("final/model.safetensors", "metrics.jsonl") for p in out.glob(f"runs/*/{name}")]
    kept += out.glob("results/runs/*.json")
    assert len(kept) == 6 + 6 + 6 + 3  # the speeds have records too
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in kept}
    again = demo(out)
    assert again.exit_code == 0, again.stderr
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in kept} == before
    assert again.stdout == first.stdout


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seed", "-1"], ["--seeds", "0"]])
def test_mistakes_get_one_clear_line(tmp_path: Path, arguments: list[str]) -> None:
    code, text = altup(tmp_path / "said.txt", "demo", "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert "makes no sense" in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_stopped_with_control_c_it_goes_on(done: tuple[Path, Any], tmp_path: Path) -> None:
    """With runs side by side, as at its usual length; what is trained is the same in the end."""
    out, steps = tmp_path / "out", 60
    shutil.copytree(done[0] / "data", out / "data")
    command = [sys.executable, "-m", "altup", "demo", "--out", str(out), "--steps", str(steps)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    seen: set[str] = set()
    for line in process.stderr:
        seen |= {word for word in ("tiny dense", "tiny altup") if word in line and ": step" in line}
        if len(seen) == 2:  # both are at it at once
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(120) == 75
    assert "Run the same command again to resume" in rest
    assert "Traceback" not in rest
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=900)
    assert again.returncode == 0, again.stderr
    assert (out / "report.html").exists()
    assert any("resuming from" in log.read_text() for log in (out / "logs").iterdir())


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
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "Uncaught" not in shown.stderr
    tips = re.findall(r'<div class="tip"(.*?)>(.*?)</div></div>', shown.stdout)
    tips = [content for attributes, content in tips if "hidden" not in attributes]  # that of the points is
    assert len(tips) == 2
    for content in tips:
        for name in ("Dense", "AltUp", "Recycled"):
            assert name in content
    assert f"{100 * mean(finals(done[0], 'altup', 'accuracy')):.1f}" in tips[1]
    for scheme, background in (("1", (255, 255, 255)), ("0", (20, 21, 23))):
        picture = tmp_path / f"{scheme}.png"
        subprocess.run(
            [browser, *flags, "--hide-scrollbars", f"--blink-settings=preferredColorScheme={scheme}",
             "--window-size=1200,2400", f"--screenshot={picture}", f"file://{copy}"],
            capture_output=True, check=True, timeout=PATIENCE,
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
