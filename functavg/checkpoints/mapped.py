"""Where in a file the memory of a mapped tensor lies."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path

MAPS = Path("/proc/self/maps")
"""Where Linux tells what is mapped into this process."""


class Mappings:
    """The parts of a file that are mapped into this process now; none where the system does not tell."""

    def __init__(self, path: Path) -> None:
        inode = os.stat(path).st_ino
        self._spans: list[tuple[int, int, int]] = []
        try:
            lines = MAPS.read_text(errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            span, _, offset, _, found, *_ = line.split(maxsplit=5)
            if int(found) == inode:
                begin, end = (int(address, 16) for address in span.split("-"))
                self._spans.append((begin, end, int(offset, 16)))
        self._spans.sort()

    def offset(self, address: int, nbytes: int) -> int | None:
        """Return where in the file some bytes of memory come from, None if they are not mapped from it."""
        place = bisect_right(self._spans, (address, 0, 0)) - 1
        for begin, end, offset in self._spans[max(place, 0) : place + 2]:
            if begin <= address and address + nbytes <= end:
                return offset + address - begin
        return None
