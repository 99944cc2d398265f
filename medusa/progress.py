"""Progress bars with time left, on stderr, so that figures on stdout stay clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(what: str, total: int, done: int = 0, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar; the block gets a function that moves it on by so many."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda amount: bar.advance(task, amount)
