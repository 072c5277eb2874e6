"""What MkDocs does for the site beyond its plugins: command pages, files from outside docs/, and formulas.

- Every verb of the command line becomes a page, made from its options, so that the reference cannot drift.
- The pages of experiments/ are pages of the site.
- Links in docs/ lead to files of the repository, so that they work where the repository is browsed. Here the files
  that pages link to are taken along into the site.
- Formulas become MathML, which browsers draw by themselves: no script, nothing fetched.
"""

from __future__ import annotations

import html
import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # pages that lie outside of docs/
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{path: path for path in (str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("experiments/**/*.md")))},
}
COMMANDS = "reference/commands"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
SYMBOLS = {
    "∈": r"\in ",
    "×": r"\times ",
    "∂": r"\partial ",
    "⊗": r"\otimes ",
    "…": r"\dots ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "·": r"\cdot ",
}


# --- the command line -------------------------------------------------------------------------------------------


def commands() -> dict[str, str]:
    """The Markdown page of each verb."""
    main = importlib.import_module("altup.cli.main")
    group = typer.main.get_command(main.app)
    context = group.make_context("altup", [], resilient_parsing=True)
    return {name: _page(group.get_command(context, name), context, f"altup {name}") for name in main.VERBS}


def _page(command: Any, parent: Any, name: str, level: int = 1) -> str:
    context = type(parent)(command, info_name=name.split()[-1], parent=parent)
    lines = [f"{'#' * level} {name}", "", _escape(command.help or ""), ""]
    if hasattr(command, "list_commands"):
        for sub in command.list_commands(context):
            lines += [_page(command.get_command(context, sub), context, f"{name} {sub}", level + 1), ""]
        return "\n".join(lines)
    lines += ["```text", _usage(command, context, name), "```", ""]
    command.complete_help()
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(parameter)
    for panel, parameters in panels.items():
        lines += [f"**{panel}**", "", "| option | what it does |", "|---|---|"]
        lines += [_row(parameter, context) for parameter in parameters] + [""]
    return "\n".join(lines)


def _usage(command: Any, context: Any, name: str) -> str:
    return " ".join([name, *command.collect_usage_pieces(context)])


def _row(parameter: Any, context: Any) -> str:
    names, words = parameter.get_help_record(context)
    words = " ".join(words.replace("[required]", "**Required.**").split())
    return f"| `{names.strip('* ')}` | {_escape(words)} |"


def _escape(text: str) -> str:
    """Help text as Markdown: what looks like an option or a token is code, and nothing is a tag."""
    text = re.sub(r"(?<![`\w-])(--[a-z][\w-]*)(?![\w`])", r"`\1`", text)
    return re.sub(r"<(?=\w)", "&lt;", text).replace("|", r"\|")


def settings(name: str) -> str:
    """The table of a config's settings, made from the lines that define them."""
    schema = importlib.import_module("altup.core.schema")
    module, _, cls = name.rpartition(".")
    lines = ["| setting | takes | default | what it is |", "|---|---|---|---|"]
    for field in schema.describe_settings(getattr(importlib.import_module(module), cls)).values():
        words = field.description(", ".join(map(str, field.allowed)))
        default = field.shown or ("none" if field.default is None else f"`{field.default!r}`")
        kind = schema.describe_kind(field.kind)
        lines.append(f"| `{field.name}` | {_escape(kind)} | {_escape(default)} | {_escape(words)} |")
    return "\n".join(lines)


# --- MkDocs calls these -----------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    reference = next(item["Reference"] for item in config.nav or [] if "Reference" in item)
    pages = [{f"altup {name}": f"{COMMANDS}/{name}.md"} for name in commands()]
    reference.insert(1, {"Commands": [f"{COMMANDS}/index.md", *pages]})
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as code hosts make them
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in commands().items():
        files.append(File.generated(config, f"{COMMANDS}/{name}.md", content=text))
    files.append(File.generated(config, f"{COMMANDS}/index.md", content=_index()))
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for file in [*files.documentation_pages()]:
        for path in sorted(_outside(file.src_uri, file.content_string)):
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def _index() -> str:
    main = importlib.import_module("altup.cli.main")
    group = typer.main.get_command(main.app)
    context = group.make_context("altup", [], resilient_parsing=True)
    lines = ["# Commands", "", "`altup --help` lists the verbs, `altup VERB --help` the options of one.", ""]
    lines += ["| verb | does |", "|---|---|"]
    for name in main.VERBS:
        words = group.get_command(context, name).get_short_help_str(300)
        lines.append(f"| [`altup {name}`]({name}.md) | {_escape(words)} |")
    return "\n".join([*lines, ""])


def _place(page: str) -> str:
    """The path of a page's source in the repository."""
    return PAGES.get(page, posixpath.join("docs", page))


def _target(page: str, link: str) -> str:
    """The path in the repository that a relative link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_place(page)), link))


def _outside(page: str, text: str) -> set[str]:
    """Files of the repository outside docs/ that a page links to and that the site takes along."""
    targets = {_target(page, match[2]) for match in LINK.finditer(text) if "://" not in match[2]}
    return {
        target
        for target in targets
        if not target.startswith(("docs/", "../")) and target not in PAGES.values() and (ROOT / target).is_file()
    }


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to the site's copies; folders, which a site cannot show, become their names."""
    here = page.file.src_uri
    back = {source: name for name, source in PAGES.items()}

    def lead(match: re.Match[str]) -> str:
        link, anchor = match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = _target(here, link)
        if target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif target in back or (ROOT / target).is_file():
            inside = back.get(target, target)
        else:
            return match[0]
        return f"{match[1]}{posixpath.relpath(inside, posixpath.dirname(here) or '.')}{anchor})"

    def folder(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        outside = not target.startswith("docs/") and (ROOT / target).is_dir()
        if not outside or "://" in match[2]:
            return match[0]
        return f"`{target}`" if match[1] == target else f"{match[1]} (`{target}`)"

    markdown = re.sub(r"^<!-- settings of (\S+) -->$", lambda m: settings(m[1]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)\)", folder, markdown)
    return LINK.sub(lead, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def inline(match: re.Match[str]) -> str:
        return _mathml(match[1], "inline")

    def display(match: re.Match[str]) -> str:
        return f'<div class="formula">{_mathml(match[1], "block")}</div>'

    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', display, content, flags=re.DOTALL)


def _mathml(formula: str, display: str) -> str:
    formula = html.unescape(formula).strip()
    for symbol, command in SYMBOLS.items():
        formula = formula.replace(symbol, command)
    return convert(formula, display=display)
