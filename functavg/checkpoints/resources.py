"""Memory and threads while files are averaged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_ALIGNMENT = 16
_setting = threading.Lock()


class Buffer:
    """Memory to read into again and again: fresh pages for each piece would cost as much time as reading it."""

    def __init__(self, nbytes: int) -> None:
        self._data = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        """Give all of it to new vectors; old ones will change."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a vector in memory that is free, or in memory of its own if there is not enough."""
        start, stop = self._used, self._used + numel * dtype.itemsize
        if stop > len(self._data):
            return torch.empty(numel, dtype=dtype)
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._data[start:stop].view(dtype)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have torch compute in the thread of the caller, and leave all other threads as they are.

    Pieces are too small to be shared among threads: on a busy machine these wait for each other most of the time.
    """
    before = torch.get_num_threads()
    with _setting:
        torch.set_num_threads(1)
        # What was set last holds for threads to come, so it is set back, by a thread that ends.
        last = threading.Thread(target=torch.set_num_threads, args=(before,))
        last.start()
        last.join()
    try:
        yield
    finally:
        torch.set_num_threads(before)
