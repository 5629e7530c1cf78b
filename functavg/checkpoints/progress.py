"""Telling how far the work is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from functavg.progress import check_progress


@contextlib.contextmanager
def reporting(progress: bool | Callable[[int, int], None], total: int) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the bytes that were done since the last call.

    Args:
        progress: ``True`` for a bar on stderr, ``False`` for nothing, or a callable of bytes done and in all.
        total: the bytes in all.

    Raises:
        TypeError: ``progress`` is neither a bool nor callable.
        ImportError: rich is not installed, which draws the bar.
    """
    check_progress(progress)
    if progress is True:
        with _bar(total) as advance:
            yield advance
    elif progress is False:
        yield lambda count: None
    else:
        done = 0

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        yield tell


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
