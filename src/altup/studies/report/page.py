"""The page of a report: HTML with its style and script inside, readable offline, in light and in dark."""

from __future__ import annotations

from html import escape
from importlib.resources import files


class Html(str):
    """Text that is HTML already; every other string is escaped where it is put into a page."""

    __slots__ = ()


def html(text: str) -> Html:
    return text if isinstance(text, Html) else Html(escape(text))


def page(title: str, *parts: Html) -> Html:
    """A whole document."""
    here = files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return Html(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, *parts: Html) -> Html:
    return Html(f"<section>\n<h2>{html(title)}</h2>\n" + "\n".join(parts) + "\n</section>")


def paragraph(text: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}">{html(text)}</p>' if kind else f"<p>{html(text)}</p>")


def figure(title: str, picture: Html, caption: str) -> Html:
    """A picture with its title above and below it what to see in it."""
    return Html(
        f"<figure>\n<h3>{html(title)}</h3>\n{picture}\n<figcaption>{html(caption)}</figcaption>\n</figure>"
    )


def grid(*figures: Html) -> Html:
    """Figures side by side where the window is wide enough."""
    return Html('<div class="grid">\n' + "\n".join(figures) + "\n</div>")


def code(text: str) -> Html:
    return Html(f"<pre><code>{html(text)}</code></pre>")
