"""The targets, and tables of what was measured against them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.measure import Timing


@dataclass(frozen=True)
class Target:
    """A ratio of two contenders' least times that must be at most, or at least, a bound.

    ``other`` may be several, of which those that take part and the fastest of them count.
    """

    work: str
    contender: str
    other: str | tuple[str, ...]
    bound: float
    faster: bool = False  # the ratio is other / contender and must reach the bound

    def row(self, times: dict[str, Timing]) -> tuple[str, ...]:
        """Return the row of the table: what, against what, the ratio, the bound and whether it is met."""
        others = [self.other] if isinstance(self.other, str) else [name for name in self.other if name in times]
        other = min(others, key=lambda name: times[name].least)
        mine, theirs = times[self.contender].least, times[other].least
        ratio = theirs / mine if self.faster else mine / theirs
        met = ratio >= self.bound if self.faster else ratio <= self.bound
        bound = f"≥ {self.bound:g} × faster" if self.faster else f"≤ {self.bound:g} ×"
        return (self.work, self.contender, other, f"{ratio:.2f}", bound, "yes" if met else "no")


def against(times: dict[str, Timing], reference: str) -> list[tuple[str, ...]]:
    """Return for each contender its least and median milliseconds and its ratio to a reference."""
    base = times[reference].least
    return [
        (name, f"{1e3 * time.least:.2f}", f"{1e3 * time.median:.2f}", f"{time.least / base:.2f}")
        for name, time in times.items()
    ]


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
