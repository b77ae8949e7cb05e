"""Progress on standard error."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(num_prompts: int, num_done: int) -> Iterator[Callable[[float], None]]:
    """A bar while prompts are measured, where somebody watches; it is told how many are done, and gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("prompt {task.fields[done]} of {task.total}"), BarColumn(), TimeRemainingColumn(), "left")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_prompts, completed=num_done, done=num_done)
        yield lambda done: progress.update(task, completed=done, done=int(done))
