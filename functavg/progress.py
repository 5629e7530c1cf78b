"""Progress of what takes long: a bar, or a function of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeAlias, TypeVar

Item = TypeVar("Item")

Progress: TypeAlias = "bool | Callable[[int, int | None], Any]"
"""False for nothing, True for a bar, or ``progress(done, total)``; ``total`` is None where nobody knows it."""

REPORTS = 1000
"""Of more items than this, not every one is reported."""


def track(
    iterable: Iterable[Item], progress: Progress, *, total: int | None = None, description: str = ""
) -> Iterator[Item]:
    """Return an iterator over the items that reports how many have been dealt with.

    Args:
        iterable: the items.
        progress: ``False`` for no report, ``True`` for a bar of rich, or a function ``progress(done, total)``, called
            after an item was dealt with: after each, or about a thousand times, and after the last one.
        total: the number of items. Default: that of ``iterable``, and None if it has none.
        description: what the bar is called.

    Raises:
        TypeError: ``progress`` is neither a bool nor callable.
        ImportError: a bar is asked for, and rich is not installed.

    Example:
        >>> from functavg.progress import track
        >>> for item in track("ab", lambda done, total: print(f"{done} of {total}")):
        ...     print(item)
        a
        1 of 2
        b
        2 of 2
    """
    check_progress(progress)
    if progress is False:
        return iter(iterable)
    if total is None and isinstance(iterable, Sized):
        with contextlib.suppress(TypeError):  # a DataLoader of an IterableDataset has a length that raises
            total = len(iterable)
    if progress is True:
        return _draw(iterable, total, description)
    return _report(iterable, progress, total)


def _report(iterable: Iterable[Item], report: Callable[[int, int | None], Any], total: int | None) -> Iterator[Item]:
    stride = max(1, (total or 0) // REPORTS)
    done = 0
    for done, item in enumerate(iterable, 1):
        yield item
        if done % stride == 0:
            report(done, total)
    if done % stride:
        report(done, total)


def _draw(iterable: Iterable[Item], total: int | None, description: str) -> Iterator[Item]:
    from rich.progress import Progress as Bars

    with Bars() as bars:
        bar = bars.add_task(description, total=total)
        yield from _report(iterable, lambda done, _: bars.update(bar, completed=done), total)


def check_progress(progress: Any) -> None:
    """Raise unless progress can be reported in this way.

    Raises:
        TypeError: it is neither a bool nor callable.
        ImportError: a bar is asked for, and rich is not installed.
    """
    if not (isinstance(progress, bool) or callable(progress)):
        raise TypeError(
            f"progress must be a bool or a function of (done, total), got {progress!r} of {type(progress).__name__}"
        )
    if progress is True:
        try:
            import rich.console
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "progress=True needs rich, which is not installed: pip install 'functavg[progress]'"
            ) from error
