"""What the site adds to the pages: files of the repository that they link to, and every command's options."""

import posixpath
import re
from collections.abc import Iterator, Sequence
from enum import EnumMeta
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
OPTIONS = re.compile(r"<!-- options: (.+?) -->")
REPOSITORY = "repository"
"""The folder of the site that files from outside docs/ go into."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for target in linked(source):
            path = ROOT / target
            if target in seen or target.startswith("docs/") or not path.is_file():
                continue
            seen.add(target)
            added = File.generated(config, place(target), content=shown(target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(added)
            waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has their targets, and write the options of commands where a page asks for them."""
    here = page.file.src_uri
    source = here.removeprefix(f"{REPOSITORY}/") if here.startswith(f"{REPOSITORY}/") else f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups()
        target = place(posixpath.normpath(posixpath.join(posixpath.dirname(source), link)))
        return before + posixpath.relpath(target, posixpath.dirname(here) or ".") + (anchor or "") + after

    return OPTIONS.sub(
        lambda match: options_table(match[1]), outside_code(markdown, lambda text: LINK.sub(moved, text))
    )


def linked(source: str) -> Iterator[str]:
    """The files of the repository that one of its Markdown files links to, as paths from its root."""
    if source.endswith(".md"):
        for match in LINK.finditer(without_code((ROOT / source).read_text(encoding="utf-8"))):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))


def place(path: str) -> str:
    """Where the site has a file of the repository, from the site's root: all but Markdown is code on a page."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{REPOSITORY}/{path}" if path.endswith(".md") else f"{REPOSITORY}/{path}.md"


def shown(path: str) -> str:
    """A file of the repository as Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n```{Path(path).suffix[1:]}\n{text}```\n"


_CODE = re.compile(r"^```.*?^```[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def without_code(markdown: str) -> str:
    """A page without its code."""
    return _CODE.sub("", markdown)


def outside_code(markdown: str, change: Any) -> str:
    """A page whose text is changed and whose code is not."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def find_command(words: Sequence[str]) -> Any:
    """A command by its words, such as `ppd train probe`, or `python -m cluster.job generate`."""
    if list(words[:3]) == ["python", "-m", "cluster.job"]:
        from cluster.job import app

        rest = words[3:]
    else:
        from ppd_runtime.cli.main import app

        rest = words[1:]
    command: Any = typer.main.get_command(app)
    for word in rest:
        command = command.commands[word]
    return command


def options_table(name: str) -> str:
    """Every option of a command, as a table."""
    rows = ["| option | default | |", "|---|---|---|"]
    for parameter in find_command(name.split()).params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        spelled = parameter.opts + parameter.secondary_opts if parameter.opts[0].startswith("-") else [parameter.name]
        value = getattr(parameter.default, "value", parameter.default)
        default = "" if parameter.required or value in (None, False, ()) else f"`{value}`"
        help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        choices = [f"`{each.value}`" for each in kind] if isinstance(kind, EnumMeta) else []
        extra = f" One of {', '.join(choices)}." if choices else ""
        names = ", ".join(f"`{each}`" for each in spelled)
        rows.append(f"| {names} | {default} | {help_text}{extra}{' Required.' if parameter.required else ''} |")
    return "\n".join(rows)
