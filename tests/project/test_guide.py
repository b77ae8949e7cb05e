"""The guide keeps to what there is: links, anchors, Python code, commands and options; and the README stays short."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from docs.site_hooks import LINK, OPTIONS, find_command, linked, options_table, without_code

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
FILES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "cluster/README.md", *PAGES]
RESULTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks" / "results").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_README_LINES = 130
JOB = ["python", "-m", "cluster.job"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, *languages: str) -> Iterator[str]:
    return (code for language, code in BLOCK.findall(text_of(name)) if language in languages)


def commands(name: str) -> Iterator[list[str]]:
    """The words of each line in a page's shell blocks, comments left out."""
    for block in blocks(name, "", "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\.venv/bin/)?(ppd|python|make|ray|pytest) ", line):
                yield shlex.split(line, comments=True)


def ours(words: list[str]) -> list[str]:
    """What of a command line is this project's: from `ppd` or the cluster's job on; empty where there is nothing."""
    for first in range(len(words)):
        if Path(words[first]).name == "ppd":
            return ["ppd", *words[first + 1 :]]
        if words[first : first + 3] == JOB:
            return words[first:]
    return []


def unknown_in(words: list[str]) -> list[str]:
    """What a command line names that there is not: its command, or options."""
    start = 3 if words[:3] == JOB else 1
    depth = start + (2 if words[start : start + 1] == ["train"] else 1)
    try:
        command = find_command(words[:depth])
    except KeyError as error:
        return [str(error)]
    known = {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}
    return [word for word in words[depth:] if word.startswith("--") and word.partition("=")[0] not in known]


def missing_programs(text: str) -> list[str]:
    """What a text calls with `python -m`, in prose or in blocks, and there is not: a module, or a package's program."""
    called = re.findall(r"python -m\s+(\w+(?:\.\w+)*)", text)
    return [module for module in called if not (is_program_here(module) or is_elsewhere(module))]


def is_program_here(module: str) -> bool:
    """Whether `python -m` finds the module in this repository, or with `PYTHONPATH=tests`."""
    paths = [folder.joinpath(*module.split(".")) for folder in (ROOT, ROOT / "tests")]
    return any(path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() for path in paths)


def is_elsewhere(module: str) -> bool:
    """Whether the module is of no folder of this repository, but of Python or an installed package."""
    top = module.partition(".")[0]
    return not any((folder / top).is_dir() for folder in (ROOT, ROOT / "tests")) and find_spec(top) is not None


def anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", without_code(text_of(name)), re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def test_the_readme_is_short_and_shows_code_at_once() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= MOST_README_LINES
    assert "```python" in lines[:25]


@pytest.mark.parametrize("name", FILES)
def test_links_lead_somewhere(name: str) -> None:
    missing = [target for target in linked(name) if not (ROOT / target).exists()]
    assert not missing
    for match in LINK.finditer(without_code(text_of(name))):
        if match[3] and match[2].endswith(".md"):
            target = (ROOT / name).parent / match[2]
            assert match[3][1:] in anchors(str(target.resolve().relative_to(ROOT))), match[0]


@pytest.mark.parametrize("name", FILES)
def test_python_code_compiles(name: str) -> None:
    for code in blocks(name, "python", "py"):
        ast.parse(code)


@pytest.mark.parametrize("name", FILES)
def test_commands_and_options_exist(name: str) -> None:
    for words in commands(name):
        if ppd := ours(words):
            assert not unknown_in(ppd), words
        if words[0] == "make":
            goals = {word for word in words[1:] if "=" not in word}
            assert goals <= set(re.findall(r"^(\w+):", text_of("Makefile"), re.MULTILINE)), words
    for called in re.findall(r"`(ppd [a-z][a-z-]*(?: [a-z][a-z-]*)?)", text_of(name)):
        assert not unknown_in(called.split()[: 3 if called.startswith("ppd train") else 2]), called


@pytest.mark.parametrize("name", [*FILES, *RESULTS])
def test_programs_that_are_called_exist(name: str) -> None:
    assert not missing_programs(text_of(name))


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_named_exist(name: str) -> None:
    named = re.findall(r"`((?:ppd_runtime|tests|benchmarks|docs|cluster|examples)/[\w./-]+)`", text_of(name))
    named += re.findall(r"`((?:pipeline|models)/[\w./-]+\.\w+)`", text_of(name))
    assert not [path for path in named if not (ROOT / path).exists() and not (ROOT / "ppd_runtime" / path).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_each_page_says_what_to_read_next(name: str) -> None:
    assert re.findall(r"^## .*$", text_of(name), re.MULTILINE)[-1] == "## What to read next"


def test_every_command_has_its_options_on_the_site() -> None:
    listed = OPTIONS.findall(text_of("docs/command-line.md"))
    top = find_command(["ppd"]).commands
    assert {name for name in top if name != "train"} <= {words.split()[1] for words in listed}
    assert {f"ppd train {name}" for name in top["train"].commands} <= set(listed)
    assert all("| `--" in options_table(words) for words in listed)


def test_the_checks_notice_what_is_wrong() -> None:
    assert unknown_in(["ppd", "generate", "text", "--k", "1", "--no-such", "2"]) == ["--no-such"]
    assert unknown_in(["ppd", "foretell"]) == ["'foretell'"]
    assert unknown_in(["ppd", "train", "probe", "--out", "F"]) == []
    assert unknown_in([*JOB, "generate", "--wrong"]) == ["--wrong"]
    assert missing_programs("call `python -m ppd_runtime.training.demo`") == ["ppd_runtime.training.demo"]
    assert missing_programs("python -m\n  ppd_runtime; python -m no_such_program") == ["ppd_runtime", "no_such_program"]
    assert missing_programs("python -m benchmarks.hop --count 1, python -m families.border, python -m venv .venv") == []
    assert ours(["ray", "job", "submit", "--", *JOB, "generate"]) == [*JOB, "generate"]


def test_contributing_lists_the_layers_as_the_contract_has_them() -> None:
    contract = text_of("pyproject.toml").split("layers = [\n")[1].split("\n]")[0]
    layers = [set(re.findall(r"ppd_runtime\.(\w+)", line)) for line in contract.splitlines()[1:]]
    table = text_of("CONTRIBUTING.md").split("| folder of `ppd_runtime/` |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [set(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows] == layers


def test_every_benchmark_is_listed() -> None:
    programs = [path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    listed = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (.*?) \|", text_of("docs/benchmarks.md"), re.MULTILINE)))
    assert {path.stem for path in programs} - {"__main__"} <= set(listed)
