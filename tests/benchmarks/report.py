"""Tables of what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.measure import Timing


@dataclass(frozen=True)
class Ratio:
    """How long one contender takes, in times of another, with what limits it.

    ``other`` may be several, of which those that take part and the fastest of them count.
    """

    work: str
    contender: str
    other: str | tuple[str, ...]
    limit: str

    def row(self, times: dict[str, Timing]) -> tuple[str, ...]:
        """Return the row of the table: what, beside what, the ratio of least times, and what limits it."""
        others = [self.other] if isinstance(self.other, str) else [name for name in self.other if name in times]
        other = min(others, key=lambda name: times[name].least)
        ratio = times[self.contender].least / times[other].least
        return (self.work, self.contender, other, f"{ratio:.2f}", self.limit)


def against(times: dict[str, Timing], reference: str, unit: float = 1e-3) -> list[tuple[str, ...]]:
    """Return for each contender its least and median time in a unit, and its ratio to a reference."""
    base = times[reference].least
    return [
        (name, f"{time.least / unit:.2f}", f"{time.median / unit:.2f}", f"{time.least / base:.2f}")
        for name, time in times.items()
    ]


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
