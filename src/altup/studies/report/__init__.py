"""Self-contained HTML reports: tables, charts and the page that holds them. Nothing is loaded from anywhere."""

from altup.studies.report.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.report.page import Html, code, contents, figure, folded, grid, html, page, paragraph, section
from altup.studies.report.plots import Bars, Lines, Plot, Scatter, save_plots
from altup.studies.report.tables import Cell, Column, HeatRow, data_table, facts, heat_map, table

__all__ = [
    "Bar",
    "Bars",
    "Cell",
    "Column",
    "HeatRow",
    "Html",
    "Lines",
    "Plot",
    "Point",
    "Scatter",
    "Series",
    "bar_chart",
    "code",
    "contents",
    "data_table",
    "facts",
    "figure",
    "folded",
    "grid",
    "heat_map",
    "html",
    "line_chart",
    "page",
    "paragraph",
    "save_plots",
    "scatter_chart",
    "section",
    "table",
]
