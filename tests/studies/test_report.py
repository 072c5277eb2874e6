"""Pages: what stands on top, tables that sort, heat maps, and text that stays text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import escape

from altup.studies.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.figures import study_figures
from altup.studies.pages import Figure, HeatRow, macro, render, standalone_svg
from altup.studies.report import Card, Continuation, StudyReport
from altup.studies.results import note_failure, write_record, write_results
from altup.studies.statistics import Verdict
from altup.studies.study import Claim, shipped
from altup.studies.tables import Cell, Column, Judged, Table
from tests.studies.samples import SEEDS, read_study, record, result, statistics


def test_what_failed_stands_on_top(tmp_path: Path) -> None:
    """Jobs that failed, and runs that diverged, before any claim."""
    lost = result("Dense", 7.0, "2", "diverged", run="lost")
    write_results(tmp_path, [*SEEDS, lost])
    write_record(tmp_path, record("lost", title="small dense seed 2", step=7, diverged="a spike"))
    note_failure(tmp_path, "k", "small altup seed 3", "out of memory")
    report = StudyReport([tmp_path], names=["varying-k"])
    assert report.problems() == [
        "failed: small altup seed 3: out of memory",
        "diverged at step 7: small dense seed 2: a spike",
    ]
    report.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.index("What failed") < text.index("small altup seed 3: out of memory") < text.index("<h2>Claims")
    assert "1 diverged" in text


def test_every_study_shows_its_own_scale(tmp_path: Path) -> None:
    """Not that of the study with the most results."""
    mini = [result("Dense", 40.0, str(i), scale="mini") for i in range(9)]
    toy = [result("Dense", 20.0, str(i), scale="toy", study="recycled") for i in range(2)]
    write_results(tmp_path, [*mini, *toy])
    report = StudyReport([tmp_path])
    assert {study.name: stats.scale for study, stats in report.run} == {"varying-k": "mini", "recycled": "toy"}
    one = StudyReport([tmp_path], scale="toy")
    assert [study.name for study, _ in one.run] == ["recycled"]


def test_a_claim_that_studies_share_is_one_card(tmp_path: Path) -> None:
    ends = {("Dense", "0"): 40.0, ("Dense", "1"): 40.1, ("AltUp K=2", "0"): 44.0, ("AltUp K=2", "1"): 44.1}
    both = [
        result(*place[:1], v, place[1], study=s) for s in ("varying-k", "recycled") for place, v in ends.items()
    ]
    write_results(tmp_path, both)
    cards = StudyReport([tmp_path], names=["varying-k", "recycled"]).cards
    run = [card for card in cards if card.judged.verdict.difference]
    assert [[name for name, _ in card.studies] for card in run] == [["varying-k", "recycled"]]
    assert [card.judged.verdict.word == "not run" for card in cards] == [False] + [True] * (len(cards) - 1)


LENGTHS = """
title: L
question: Q
rows: {Dense: {method: dense}, AltUp K=2: {method: altup, k: 2}}
equal_time: AltUp K=2
lengths: {mini: [10, 20]}
measures: [accuracy, loss]
"""


def test_lengths_are_drawn_against_time_and_flops() -> None:
    results = []
    for steps, gain in ((10, 0.1), (20, 0.3)):
        place = {"study": "own", "size": f"small, {steps} steps", "budget": f"time of {steps}"}
        for label, loss in (("Dense", 4.0), ("AltUp K=2", 4.0 - gain)):
            for seed in "01":
                for metric, value in (
                    ("loss", loss),
                    ("planned_seconds", 60.0 * steps),
                    ("run_flops", 1e15 * steps),
                ):
                    results.append(result(label, value, seed, metric, **place))
    figures = study_figures(read_study(LENGTHS), statistics(results, "own"), lambda key: None)
    titles = {figure.title for figure in figures}
    for what in ("time", "FLOPs"):
        assert {f"Held-out loss against {what}", f"Held-out loss against {what}: difference to Dense"} <= titles
    gains = next(f.picture for f in figures if f.title == "Held-out loss against time: difference to Dense")
    assert "-0.100" in gains
    assert "-0.300" in gains


def test_figures_are_files_that_stand_alone() -> None:
    svg = standalone_svg(line_chart([Series("a < b", [(0, 1), (1, 2)], 0)], x_label="x", y_label="y"))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert any(element.tag.endswith("style") for element in root)


def test_a_table_holds_its_values_for_sorting() -> None:
    columns = [Column("model", text=True), Column("paper", "score"), Column("ours", "score")]
    rows = [[Cell("a"), Cell("61.2", "+0.5", 61.21), Cell("not run", kind="absent")]]
    found = escape(Table(columns, rows, "caption", filters=True))
    assert '<th scope="colgroup" colspan="2">score</th>' in found
    assert '<td data-value="61.21">61.2<small>+0.5</small></td>' in found
    assert '<td class="absent">not run</td>' in found
    assert found.count("<button") == 3
    assert 'type="search"' in found
    assert 'type="search"' not in escape(Table(columns, rows, "caption"))


def test_heat_is_deepest_at_the_given_distance() -> None:
    cells = re.findall(
        r'<td class="(\w+)" style="--depth:([\d.]+)">(.*?)</td>',
        macro(
            "heat_map", ["layer", "a", "b", "c", "d"], [HeatRow("1", [1.5, 0.75, -0.001, 9], [1, 1, 0, 1])], 0.5
        ),
    )
    assert cells == [
        ("above", "1.000", "1.50"),
        ("below", "0.500", "0.75"),
        ("below", "0.002", "0.00"),
        ("above", "1.000", "9.00"),
    ]


def test_text_stays_text() -> None:
    evil = "<script>alert('x')</script>"
    pictures = [
        macro("table", [evil, evil], [[evil, evil]], evil),
        line_chart([Series(evil, [(1, 1)], 0)], x_label=evil, y_label=evil),
        bar_chart([Bar(evil, 1, evil, 0)], 1.0),
        scatter_chart([Point(evil, 1, 1, 0)], x_label=evil, y_label=evil, line=[(0, 0), (1, 1)], line_name=evil),
        macro("heat_map", [evil], [HeatRow(evil, [], [])], 1.0),
    ]
    shown = Table([Column(evil, evil)], [[Cell(evil, evil, kind=evil)]], evil)
    figures = [Figure(evil, picture, evil, evil) for picture in pictures]
    study = {
        "name": evil,
        "title": evil,
        "question": evil,
        "finding": evil,
        "tables": [shown],
        "figures": figures,
        "alone": True,
    }
    verdict = Verdict(Claim(evil, evil), evil, None, evil)
    card = Card(Judged(verdict, evil, evil, evil, evil, evil, evil, None), [(evil, evil)])
    whole = render(
        "report.html", title=evil, lead=evil, problems=[evil],
        continued=[Continuation(evil, evil, {evil: evil})], judged=[card], one_seed=[card], most_cards=0,
        not_run=[card], studies=[study], studies_not_run=[study], coefficients=figures, facts=[(evil, evil)],
        commands=evil, results=shown,
    )  # fmt: skip
    assert "<script>alert" not in whole
    assert whole.count("alert(&#39;x&#39;)") > 20


def test_all_studies_have_a_report_without_results(tmp_path: Path) -> None:
    StudyReport([tmp_path]).write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for study in shipped().values():
        assert str(escape(study.title)) in text
