"""Figures as image files; needs the `plots` extra."""

from pathlib import Path
from typing import TYPE_CHECKING

from ppd_runtime.files.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_image_file(path: Path) -> None:
    """Raise ValueError if matplotlib is not installed, or does not know the kind of file."""
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if _kind(path) not in known:
        raise ValueError(f"{path}: no kind of image; choose one of {', '.join(sorted(known))}")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, its size in inches; raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('plots need matplotlib: run pip install ".[plots]" in the project\'s folder') from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path, dpi: int) -> None:
    """Write a whole file or none; its name says what kind, PNG without a suffix."""
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, dpi=dpi, format=_kind(path))


def _kind(path: Path) -> str:
    return path.suffix[1:].lower() or "png"
