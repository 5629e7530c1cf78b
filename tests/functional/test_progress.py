"""Progress is reported after each item, or about a thousand times, by a function or a bar."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from functavg.progress import REPORTS, track


def reported(items: Any, **options: Any) -> list[tuple[int, int | None]]:
    """Return what is reported while items are taken, after checking that they are all of them."""
    reports: list[tuple[int, int | None]] = []
    items = list(items)
    assert list(track(items, lambda *report: reports.append(report), **options)) == items
    return reports


def test_each_item_is_reported_once_it_was_dealt_with() -> None:
    events: list[Any] = []
    for item in track("ab", lambda done, total: events.append((done, total))):
        events.append(item)
    assert events == ["a", (1, 2), "b", (2, 2)]


@pytest.mark.parametrize("size", [0, 1, REPORTS, 3 * REPORTS + 1, 10 * REPORTS])
def test_of_many_items_about_a_thousand_are_reported_and_the_last_is(size: int) -> None:
    reports = reported(range(size))
    assert len(reports) <= 2 * REPORTS
    assert len(reports) >= min(size, REPORTS)
    assert reports == sorted(set(reports))
    assert not size or reports[-1] == (size, size)


def test_the_total_may_be_given_or_unknown() -> None:
    seen: list[Any] = []
    list(track(iter("ab"), lambda done, total: seen.append(total)))
    list(track(iter("ab"), lambda done, total: seen.append(total), total=7))
    assert seen == [None, None, 7, 7]


def test_no_progress_is_the_iterator_itself() -> None:
    items = iter([1, 2])
    assert track(items, False) is items


def test_what_was_taken_is_not_read_ahead() -> None:
    def load() -> Iterator[int]:
        yield 1
        raise AssertionError("the second one is read too early")

    assert next(track(load(), lambda done, total: None)) == 1


def test_a_bar_is_drawn_and_left_when_its_items_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = pytest.importorskip("rich")
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(rich, "_console", console)
    assert list(track(iter("abc"), True, total=3, description="letters")) == ["a", "b", "c"]
    assert "letters" in console.file.getvalue()
    assert "100%" in console.file.getvalue()
    items = track("abc", True)
    next(items)
    items.close()
    shown, hidden = (console.file.getvalue().count(code) for code in ("\x1b[?25h", "\x1b[?25l"))
    assert shown == hidden == 2  # the cursor comes back


def test_without_rich_a_bar_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"progress=True needs rich, .*: pip install 'functavg\[progress\]'"):
        track("ab", True)
    assert reported("ab") == [(1, 2), (2, 2)]


@pytest.mark.parametrize("progress", [None, 1, "yes"])
def test_progress_is_a_bool_or_a_function(progress: Any) -> None:
    with pytest.raises(TypeError, match=r"progress must be a bool or a function of \(done, total\), got"):
        track("ab", progress)
