"""`altup study` as a user meets it: everything at the smoke scale, the report, a browser."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.studies import paper
from altup.studies.results import note_failure, write_results
from altup.studies.study import shipped
from tests.cli.test_demo import Balanced
from tests.processes import PATIENCE, altup
from tests.studies import samples

RUN = ("varying-k", "recycled", "equal-time")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three studies at the smoke scale, in one process."""
    folder = tmp_path_factory.mktemp("studies") / "out"
    result = CliRunner().invoke(app, ["study", "run", *RUN, "--scale", "smoke", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert "failed" not in result.output
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> Path:
    path = out / "report.html"
    result = CliRunner().invoke(app, ["study", "report", "--results", str(out / "results"), "--out", str(path)])
    assert result.exit_code == 0, result.output
    return path


def rows_of(text: str, study: str) -> list[list[str]]:
    """The cells of a study's first table."""
    section = re.search(rf'<section id="{study}">(.*?)</section>', text, re.DOTALL)
    assert section, study
    body = re.search(r"<tbody>(.*?)</tbody>", section[1], re.DOTALL)
    assert body
    rows = re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_every_study_left_results(out: Path) -> None:
    for name in RUN:
        with (out / "results" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        accuracy = [row for row in rows if row["metric"] == "accuracy"]
        assert len(accuracy) >= 2, name
        for row in accuracy:
            assert 0 <= float(row["value"]) <= 100
            record = json.loads((out / "results" / "runs" / f"{row['run']}.json").read_text())
            assert record["measures"]["accuracy"] == pytest.approx(float(row["value"]), rel=1e-6)
            assert row["command"].startswith("altup study run varying-k recycled equal-time --scale smoke --only ")
    with (out / "results" / "recycled.csv").open() as file:
        tuned = {(row["label"], row["metric"]) for row in csv.DictReader(file)}
    for label in ("Dense", "AltUp K=2", "Recycled K=2"):
        assert {(label, "glue"), (label, "squad_em"), (label, "squad_f1")} <= tuned


def test_the_report_has_a_row_for_every_row_of_the_papers_tables(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    shown = {name: rows_of(text, name) for name in shipped()}
    digits = [re.sub(r"<small>.*?</small>", "", cell) for rows in shown.values() for row in rows for cell in row]
    for table in paper.TABLES:
        for row in paper.table(table):
            for column in ("pretrain_accuracy", "mlm_accuracy", "superglue", "squad_f1", "triviaqa_em"):
                if column in row:
                    assert f"{row[column]:.2f}" in digits, (table, row)
    counts = {"varying-k": 9 + 3, "parameters-and-speed": 8, "sequence": 5, "experts": 12}
    assert {name: len(shown[name]) for name in counts} == counts
    assert "not run at this scale" in shown["varying-k"][0]
    for percent in (27, 39, 87, 29):
        assert re.search(rf'data-value="{percent}.0">{percent}</td>', text)


def test_the_report_stands_alone(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert all(re.match(r"a href=#", load) for load in parser.loads)
    targets = {load.removeprefix("a href=#") for load in parser.loads}
    assert {"varying-k", "recycled"} <= targets <= set(re.findall(r'<section id="(.*?)"', text))
    outside = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|@import|url\(|<link|<iframe|fetch\(|XMLHttpRequest", outside)
    ids = re.findall(r' id="(.*?)"', text)
    assert len(ids) == len(set(ids))


def test_every_chart_is_also_a_file(report: Path) -> None:
    import xml.etree.ElementTree as ET

    folder = report.with_name("report-plots")
    figures = set(re.findall(r'<figure id="(.*?)"', report.read_text(encoding="utf-8")))
    assert {path.stem for path in folder.glob("*.svg")} == figures
    assert {
        f"equal-time-held-out-{y}-against-{x}" for y in ("loss", "accuracy") for x in ("time", "flops")
    } <= figures
    for path in folder.glob("*.svg"):
        ET.parse(path)


def test_the_curves_and_bars_are_the_results(out: Path, report: Path) -> None:
    parser = Balanced()
    text = report.read_text(encoding="utf-8")
    figure = re.search(r'<figure id="varying-k-held-out-loss">(.*?)</figure>', text, re.DOTALL)
    assert figure
    parser.feed(figure[1])
    with (out / "results" / "varying-k.csv").open() as file:
        runs = {row["label"]: row["run"] for row in csv.DictReader(file) if row["metric"] == "loss"}
    for line in parser.hover[0]["series"]:
        record = json.loads((out / "results" / "runs" / f"{runs[line['name']]}.json").read_text())
        assert [p[3] for p in line["points"]] == [f"{loss:.2f}" for _, loss, _ in record["curves"]["held_out"]]


def test_tables_as_markdown_and_csv(out: Path) -> None:
    result = CliRunner().invoke(app, ["study", "table", "varying-k", "--results", str(out / "results")])
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 12
    assert any(line.startswith("| base · AltUp K=2 | – | 66.96 (+0.54) | not run at this scale") for line in lines)
    assert "- AltUp K=2 better than Dense, held-out accuracy, tiny: " in result.output
    assert "one seed, no verdict (1 seed each: no interval. The paper: +0.65 (small)" in result.output
    arguments = ["study", "table", "--format", "csv", "--results", str(out / "results"), "varying-k"]
    table = list(csv.reader(CliRunner().invoke(app, arguments).output.strip().splitlines()))
    assert {len(row) for row in table} == {len(table[0])}


def test_a_report_overwrites_reports_alone(tmp_path: Path) -> None:
    from altup.core.errors import UserError
    from altup.studies.results import write_results
    from tests.studies.samples import SEEDS, result

    def write(name: str) -> BaseException | None:
        arguments = ["study", "report", "varying-k", "--results", str(tmp_path / "results")]
        return CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / name)]).exception

    speeds = [result(label, 1.0, "", "relative_speed") for label in ("Dense", "AltUp K=2")]  # which are plotted
    write_results(tmp_path / "results", [*SEEDS, *speeds])
    (tmp_path / "keep.html").write_text("<h1>mine</h1>")
    assert "keep.html is not a report of studies and would be written over" in str(write("keep.html"))
    assert (tmp_path / "keep.html").read_text() == "<h1>mine</h1>"
    assert not (tmp_path / "keep-plots").exists()
    assert write("ours.html") is None
    assert write("ours.html") is None
    plots = sorted((tmp_path / "ours-plots").iterdir())
    assert {path.suffix for path in plots} == {".svg"}
    for path in plots[:1]:
        before = path.read_bytes(), (tmp_path / "ours.html").stat().st_mtime_ns
        path.write_text("mine")
        assert f"{path.name} is not a plot" in str(write("ours.html"))
        assert (path.read_text(), (tmp_path / "ours.html").stat().st_mtime_ns) == ("mine", before[1])
        path.write_bytes(before[0])
    (tmp_path / "other-plots").write_text("mine")
    error = write("other.html")
    assert isinstance(error, UserError)
    assert "other-plots is a file" in str(error)
    assert not (tmp_path / "other.html").exists()


def test_a_second_run_finds_everything_done(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/final/model.safetensors")}
    result = CliRunner().invoke(app, ["study", "run", *RUN, "--scale", "smoke", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "0 jobs finished now" in result.output
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/final/model.safetensors")} == before


def test_a_dry_run_says_what_it_would_cost(out: Path) -> None:
    arguments = ["study", "run", "varying-k", "equal-time", "--out", str(out), "--seeds", "0,7", "--dry-run"]
    result = CliRunner().invoke(app, [*arguments, "--device", "H200", "--price", "4"])
    assert result.exit_code == 0, result.output
    runs = set()  # studies share runs, and those of equal time may happen to have as many steps as the others
    for name in ("varying-k", "equal-time"):
        with (out / "results" / f"{name}.csv").open() as file:
            runs |= {row["run"] for row in csv.DictReader(file) if row["metric"] == "accuracy"}
    assert result.output.count("finished") == len(runs)
    assert result.output.count("│ new") >= len(runs)
    assert "at 4 an hour" in " ".join(result.output.split())
    assert not list(out.glob("runs/*seed-7*"))
    arguments = ["study", "run", "varying-k", "--scale", "paper", "--data", str(out / "data/text"), "--dry-run"]
    paper_cost = CliRunner().invoke(app, [*arguments, "--device", "H200", "--out", str(out / "paper")])
    assert "days of one device" in " ".join(paper_cost.output.split())


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the smoke scale makes its own text."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    arguments = ["study", "run", "varying-k", "--scale", "smoke", "--dry-run", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "of one device" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]


def test_what_text_would_cost_is_told_before_it_is_prepared(tmp_path: Path) -> None:
    arguments = ["study", "run", "varying-k", "--scale", "paper", "--dry-run", "--device", "H200"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "T5's vocabulary" in result.output
    assert "days of one device" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "name studies"),
        (["run", "varying-k", "--all"], "name studies"),
        (["run", "varing-k"], "did you mean 'varying-k'"),
        (["run", "varying-k", "--scale", "mini"], "altup prepare"),
        (["run", "varying-k", "--scale", "huge"], "not known"),
        (["run", "varying-k", "--seeds", "x"], "whole numbers"),
        (["run", "varying-k", "--jobs", "0"], "jobs=0"),
        *(
            (["run", "varying-k", "--set", given], "the study decides that")
            for given in (
                "k=3",
                "extra_layers=2",
                "experts=3",
                "model_overrides={d_ff: 9}",
            )
        ),
        (["run", "varying-k", "--seeds", ""], "whole numbers"),
        (["run", "varying-k", "--time-limit", "0"], "--time-limit 0"),
        (["run", "varying-k", "--time-limit", "nan"], "--time-limit nan"),
        (["run", "varying-k", "--dry-run", "--price", "-3"], "--price"),
        (["run", "varying-k", "--tasks", "nowhere"], "--tasks nowhere: no such folder"),
        (["report", "--results", "nowhere"], "nowhere is no folder"),
        (["table", "--format", "latex"], "latex"),
        (["merge", "nowhere", "--into", "here"], "no results"),
    ],
)
def test_mistakes_get_one_clear_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    from altup.core.errors import UserError

    where = ["--out", str(tmp_path / "out")] if arguments[0] == "run" else []
    result = CliRunner().invoke(app, ["study", *arguments, *where])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)
    assert not (tmp_path / "out" / "runs").exists()


def test_what_cannot_be_written_is_one_line(out: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ["report", "--results", out / "results", "--out", tmp_path, "--no-plots"],
        ["merge", out / "results", "--into", file],
    ):
        code, text = altup(tmp_path / f"{arguments[0]}.txt", "study", *arguments)
        assert (code, len(text.splitlines())) == (2, 1), text
        assert text.startswith(f"altup: {arguments[4] if arguments[0] == 'report' else file}: ")


def test_what_failed_and_what_is_missing_is_said(tmp_path: Path) -> None:
    write_results(tmp_path, [samples.result("Dense", 40.0)])
    note_failure(tmp_path, "k", "small altup seed 0", "out of memory")
    arguments = ["study", "table", "varying-k", "recycled", "--results", str(tmp_path)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.stderr.startswith("failed: small altup seed 0: out of memory\n")
    assert "not run: recycled; run what is missing: altup study run recycled\n" in shown.stderr


def test_list_names_every_study() -> None:
    result = CliRunner().invoke(app, ["study", "list"])
    assert result.exit_code == 0
    flat = re.sub(r"[\s│]+", "", result.output)
    for name in shipped():
        assert name in flat


PROBE = """
<script>
const told = {errors: [], sorted: {}, tips: 0};
window.addEventListener("error", (event) => told.errors.push(event.message));
addEventListener("load", () => {
  const root = document.documentElement;
  told.height = root.scrollHeight;
  told.overflow = [root.scrollWidth - root.clientWidth];
  told.unfolded = document.querySelectorAll("details[open]").length;
  document.querySelector(".unfold").click();
  told.overflow.push(root.scrollWidth - root.clientWidth);
  told.opened = root.scrollHeight;
  document.querySelector(".unfold").click();
  location.hash = "#bert";
  dispatchEvent(new Event("hashchange"));
  told.linked = document.querySelector("#bert details").open;
  const table = document.querySelector("#varying-k table.sortable");
  const column = [...table.tHead.rows[1].cells].findIndex((cell) => cell.textContent === "paper");
  const read = () => [...table.tBodies[0].rows].map((row) => row.cells[column].dataset.value ?? null);
  const button = table.tHead.rows[1].cells[column].querySelector("button");
  button.click();
  told.sorted.up = read();
  told.sorted.state = table.tHead.rows[1].cells[column].ariaSort;
  button.click();
  told.sorted.down = read();
  for (const svg of document.querySelectorAll("svg[data-hover], svg[data-points]")) {
    svg.focus();
    svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    if (!svg.parentElement.querySelector(".tip").hidden) told.tips += 1;
  }
  told.charts = document.querySelectorAll("svg[data-hover], svg[data-points]").length;
  document.querySelector("details").open = true;
  const field = document.querySelector("#results input[type=search]");
  field.value = "recycled squad";
  field.dispatchEvent(new Event("input"));
  told.filtered = [...document.querySelectorAll("#results tbody tr")].filter((row) => !row.hidden)
    .map((row) => row.textContent);
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  told.theme = [before, getComputedStyle(document.body).backgroundColor];
  document.body.dataset.told = JSON.stringify(told);
});
</script>
"""


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs chromium")
    return found


def look(page: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser(), *quiet, "--enable-logging=stderr", *flags, f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def probe(report: Path, tmp_path: Path, width: int) -> dict[str, Any]:
    """What a script inside the page finds. A frame makes it as narrow as asked for: windows have a least width."""
    copy = tmp_path / "copy.html"
    copy.write_text(report.read_text(encoding="utf-8").replace("<main>", PROBE + "<main>"), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body><iframe src="copy.html" width="{width}" height="900"></iframe><script>onload = () => {{'
        "const inside = document.querySelector('iframe').contentDocument.body;"
        "document.body.dataset.told = inside.dataset.told;}</script>"
    )
    shown = look(frame, tmp_path, "--allow-file-access-from-files", "--dump-dom")
    assert "Uncaught" not in shown.stderr
    found = re.search(r'data-told="(.*?)"', shown.stdout)
    assert found, shown.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


def test_a_real_browser_runs_it(report: Path, tmp_path: Path) -> None:
    """On a phone: no error, nothing overflows, tables sort and filter, charts answer to keys, light and dark."""
    told = probe(report, tmp_path, 390)
    assert told["errors"] == []
    assert told["overflow"] == [0, 0]  # folded, and with everything open
    assert told["height"] < 8000 < told["opened"]
    assert told["unfolded"] == 0
    assert told["linked"]
    numbers = [float(value) for value in told["sorted"]["up"] if value is not None]
    assert len(numbers) == 9
    assert numbers == sorted(numbers)
    assert told["sorted"]["up"][9:] == [None] * 3
    assert told["sorted"]["state"] == "ascending"
    down = [float(value) for value in told["sorted"]["down"] if value is not None]
    assert down == numbers[::-1]
    assert told["sorted"]["down"][9:] == [None] * 3
    assert told["tips"] == told["charts"] > 10
    assert told["filtered"]
    assert all("recycled" in row.lower() and "squad" in row.lower() for row in told["filtered"])
    assert sorted(told["theme"]) == ["rgb(20, 21, 23)", "rgb(255, 255, 255)"]


@pytest.mark.slow
def test_it_looks_right_in_light_and_dark(report: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    for scheme, background in (("1", (255, 255, 255)), ("0", (20, 21, 23))):
        picture = tmp_path / f"{scheme}.png"
        flags = [f"--blink-settings=preferredColorScheme={scheme}", "--hide-scrollbars", "--window-size=1200,3000"]
        look(report, tmp_path, *flags, f"--screenshot={picture}")
        pixels = imread(picture)
        assert tuple((pixels[3, 3, :3] * 255).round().astype(int)) == background
        assert len({tuple(c) for c in pixels[::7, ::7, :3].reshape(-1, 3)}) > 20
