"""Prompts in groups: by category if their file has categories, else by file."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ppd_runtime.checks import check_whole
from ppd_runtime.tune.prompt_files import read_prompts


@dataclass(frozen=True)
class GroupedPrompt:
    """A prompt and its group."""

    group: str
    text: str


def read_groups(
    sources: Sequence[str], limit: int | None = None, categories: Sequence[str] = ()
) -> list[GroupedPrompt]:
    """The first `limit` prompts (None: all) of each group of some files, "demo" among them for the shipped prompts.

    A group is a category, or a file without categories; with several files, a category of one file.

    Args:
        sources: JSON Lines files, see `read_prompts`.
        limit: of each group.
        categories: those to take; none takes all prompts.

    Raises:
        ValueError: naming the file and the line that is broken, a file given twice, or a category that no file has.
    """
    if not sources:
        raise ValueError("no prompts: give a file, or 'demo'")
    if limit is not None:
        check_whole("limit", limit, 1)
    files = {source: read_prompts(source) for source in sources}
    if len(files) < len(sources):
        twice = next(source for source in sources if sources.count(source) > 1)
        raise ValueError(f"prompts={twice!r}: is given twice")
    known = sorted({prompt.category for prompts in files.values() for prompt in prompts if prompt.category})
    unknown = [category for category in categories if category not in known]
    if unknown:
        has = f"has {', '.join(known)}" if known else "has none"
        raise ValueError(f"category {unknown[0]!r}: {', '.join(sources)} {has}")
    groups: dict[str, list[GroupedPrompt]] = {}
    names = _names(sources)
    for source, prompts in files.items():
        for prompt in prompts:
            if not categories or prompt.category in categories:
                group = _group(names[source], prompt.category, len(files) > 1)
                groups.setdefault(group, []).append(GroupedPrompt(group, prompt.text))
    return [prompt for group in groups.values() for prompt in islice(group, limit)]


def _group(file: str, category: str | None, several: bool) -> str:
    if category is None:
        return file
    return f"{file}, {category}" if several else category


def _names(sources: Sequence[str]) -> dict[str, str]:
    """Short names, where they tell the files apart."""
    stems = {source: Path(source).stem for source in sources}
    return stems if len(set(stems.values())) == len(stems) else {source: source for source in sources}
