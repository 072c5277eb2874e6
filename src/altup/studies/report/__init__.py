"""Self-contained HTML reports: tables, charts and the page that holds them. Nothing is loaded from anywhere."""

from altup.studies.report.charts import Bar, Series, bar_chart, line_chart
from altup.studies.report.page import Html, code, figure, grid, page, paragraph, section
from altup.studies.report.tables import HeatRow, facts, heat_map, table

__all__ = [
    "Bar",
    "HeatRow",
    "Html",
    "Series",
    "bar_chart",
    "code",
    "facts",
    "figure",
    "grid",
    "heat_map",
    "line_chart",
    "page",
    "paragraph",
    "section",
    "table",
]
