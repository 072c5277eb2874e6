"""The page of a report: HTML with its style and script inside, readable offline, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files


class Html(str):
    """Text that is HTML already; every other string is escaped where it is put into a page."""

    __slots__ = ()


def html(text: str) -> Html:
    return text if isinstance(text, Html) else Html(escape(text))


def page(title: str, *parts: Html) -> Html:
    """A whole document, with a button that changes between light and dark."""
    here = files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return Html(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        '<button type="button" id="theme" hidden>dark</button>\n'
        f"<h1>{html(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, *parts: Html, name: str = "") -> Html:
    place = f' id="{html(name)}"' if name else ""
    return Html(f"<section{place}>\n<h2>{html(title)}</h2>\n" + "\n".join(parts) + "\n</section>")


def contents(entries: Sequence[tuple[str, str]]) -> Html:
    """Links to sections by (name, title)."""
    links = "".join(f'<li><a href="#{html(name)}">{html(title)}</a></li>' for name, title in entries)
    return Html(f'<nav aria-label="Contents"><ol>{links}</ol></nav>')


def paragraph(text: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}">{html(text)}</p>' if kind else f"<p>{html(text)}</p>")


def figure(title: str, picture: Html, caption: str, name: str = "") -> Html:
    """A picture with its title above and below it what to see in it."""
    place = f' id="{html(name)}"' if name else ""
    return Html(
        f"<figure{place}>\n<h3>{html(title)}</h3>\n{picture}\n<figcaption>{html(caption)}</figcaption>\n</figure>"
    )


def grid(*figures: Html) -> Html:
    """Figures side by side where the window is wide enough."""
    return Html('<div class="grid">\n' + "\n".join(figures) + "\n</div>")


def code(text: str) -> Html:
    return Html(f'<pre tabindex="0"><code>{html(text)}</code></pre>')


def folded(summary: str, *parts: Html) -> Html:
    """What most readers can leave closed."""
    return Html(f"<details>\n<summary>{html(summary)}</summary>\n" + "\n".join(parts) + "\n</details>")
