"""Memory and threads while files are averaged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")

WORKERS = 2
"""A third thread waits for the disk, or for the other two."""

_ALIGNMENT = 16
_setting = threading.Lock()


class Buffer:
    """Memory to read into again and again: fresh pages for each piece would cost as much time as reading it."""

    def __init__(self, nbytes: int) -> None:
        self._data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._used = 0

    def clear(self) -> None:
        """Give all of it to new vectors; old ones will change."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a vector in memory that is free, or in memory of its own if there is not enough."""
        start, stop = self._used, self._used + numel * dtype.itemsize
        if stop > self._data.numel():
            return torch.empty(numel, dtype=dtype, device="cpu")
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._data[start:stop].view(dtype)


def compute_ahead(compute: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """Yield ``compute(item)`` of each item in turn, while threads work on the next ones.

    So files are read and written at the same time. One result more than there are threads is held at most. What
    ``compute`` raises is raised in its turn. Close the generator where it is left early: the threads end then.
    """
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(WORKERS, "functavg", _compute_alone) as pool:
        try:
            for item in items:
                pending.append(pool.submit(compute, item))
                if len(pending) > WORKERS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _compute_alone() -> None:
    """Have torch compute in this thread alone, and leave all other threads as they are.

    Pieces are too small to be shared among threads: on a busy machine these wait for each other most of the time.
    """
    with _setting:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        # What was set last holds for threads to come, so it is set back, by a thread that ends.
        last = threading.Thread(target=torch.set_num_threads, args=(before,))
        last.start()
        last.join()
