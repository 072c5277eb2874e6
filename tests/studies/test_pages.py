"""Pages: tables that sort, heat maps, and text that stays text."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from altup.studies.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.pages import Cell, Column, DataTable, Figure, HeatRow, heat_map, render, table
from altup.studies.verdicts import Card


def test_a_data_table_holds_its_values_for_sorting() -> None:
    columns = [Column("model", text=True), Column("paper", "score"), Column("ours", "score")]
    rows = [[Cell("a"), Cell("61.2", "+0.5", 61.21), Cell("not run", kind="absent")]]
    found = escape(DataTable(columns, rows, "caption", filters=True))
    assert '<th scope="colgroup" colspan="2">score</th>' in found
    assert '<td data-value="61.21">61.2<small>+0.5</small></td>' in found
    assert '<td class="absent">not run</td>' in found
    assert found.count("<button") == 3
    assert 'type="search"' in found
    assert 'type="search"' not in escape(DataTable(columns, rows, "caption"))


def test_heat_is_deepest_at_the_given_distance() -> None:
    cells = re.findall(
        r'<td class="(\w+)" style="--depth:([\d.]+)">(.*?)</td>',
        heat_map(["layer", "a", "b", "c", "d"], [HeatRow("1", [1.5, 0.75, -0.001, 9], [1, 1, 0, 1])], 0.5),
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
        table([evil, evil], [[evil, evil]], evil),
        line_chart([Series(evil, [(1, 1)], 0)], x_label=evil, y_label=evil),
        bar_chart([Bar(evil, (1,), evil, 0)], (evil,)),
        scatter_chart([Point(evil, 1, 1, 0)], x_label=evil, y_label=evil, line=[(0, 0), (1, 1)], line_name=evil),
        heat_map([evil], [HeatRow(evil, [], [])], 1.0),
    ]
    shown = DataTable([Column(evil, evil)], [[Cell(evil, evil, kind=evil)]], evil)
    study = {"name": evil, "title": evil, "question": evil, "finding": evil, "tables": [shown]}
    study["plots"] = [Figure(evil, picture, evil, evil) for picture in pictures]
    study["elsewhere"] = [(evil, evil, evil)]
    card = Card(evil, evil, evil, evil, evil, evil, Markup(""), [(evil, evil)])
    whole = render(
        "report.html", title=evil, lead=evil, claims_title=evil, judged=[card], one_seed=[card], most_cards=0,
        not_run=[card], studies=[study], studies_not_run=[study], coefficients=study["plots"],
        begun=[shown], begun_plots=study["plots"], coefficient_plots=[], facts=[(evil, evil)],
        commands=evil, results=shown,
    )  # fmt: skip
    assert "<script>alert" not in whole
    assert whole.count("alert(&#39;x&#39;)") > 20


def test_heads_of_groups_span_their_columns() -> None:
    columns = [Column("a"), Column("b", "x"), Column("c", "x"), Column("d"), Column("e"), Column("f", "y")]
    assert DataTable(columns, [], "").groups == [("", 1), ("x", 2), ("", 1), ("", 1), ("y", 1)]
    assert DataTable(columns[:1], [], "").groups == []
