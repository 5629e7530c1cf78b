"""Measurements: interleaved times, with and without new pages; extra peak memory, host reads."""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], Any]

clock = time.perf_counter
"""What times are taken by; ``time.process_time`` is for a machine that does other work at the same time."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender."""

    least: float
    median: float


def interleaved(contenders: dict[str, Work], rounds: int = 31, calls: int = 1) -> dict[str, Timing]:
    """Return the times of contenders that took turns, so that a slow moment of the machine meets all of them.

    Their order is another in each round: what comes before leaves its own data in the caches.

    Args:
        contenders: what to measure, by name.
        rounds: how often each has its turn. Default: 31.
        calls: calls in one turn, for works of microseconds. Default: 1.
    """
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in shuffled.sample(list(contenders.items()), len(contenders)):
                _synchronize()
                start = clock()
                for _ in range(calls):
                    work()
                _synchronize()
                times[name].append((clock() - start) / calls)
    finally:
        gc.enable()
    return {name: Timing(min(seconds), statistics.median(seconds)) for name, seconds in times.items()}


@contextmanager
def kept_pages() -> Iterator[bool]:
    """Let the allocator of glibc keep the pages of freed memory inside the block; yield whether that could be done.

    By default it returns those of large tensors to the system, and each new large tensor pays for new pages.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        yield False
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield True
    finally:
        mallopt(_MMAP_MAX, 65536)
        mallopt(_TRIM_THRESHOLD, 2**17)
        trim(0)


def extra_peak(work: Work) -> int | None:
    """Return by how many bytes the process grew at most while it worked; None where the system does not tell."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        work()
        gc.collect()
        clear.write_text("5")  # sets the peak back to what is resident now
        before = _status(status, "VmHWM")
        work()
        return _status(status, "VmHWM") - before
    except OSError:
        return None


@contextmanager
def counted_host_reads() -> Iterator[list[str]]:
    """Collect the operations inside the block that read a tensor back to the host."""
    reads: list[str] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                reads.append(str(func))
            return func(*args, **(kwargs or {}))

    with Counter():
        yield reads


def kernel_launches(work: Work) -> int:
    """Return how many kernels the work launches on CUDA."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("cudaLaunchKernel"))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
