"""Device counts: recognise, make and overwrite them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from functavg import trees
from functavg.scalars import full, is_compiling, is_host
from functavg.state import AverageState, T

if TYPE_CHECKING:
    from functavg.state import Count


def is_integer_array(value: Any) -> bool:
    """Tell whether a value is a 0-d array of integers on a device, also a traced one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = value.dtype
        return value.ndim == 0 and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if isinstance(value, np.ndarray) or not hasattr(value, "__array_namespace__"):
        return False
    return value.ndim == 0 and bool(value.__array_namespace__().isdtype(value.dtype, "integral"))


def match_count(count: Count, like: Count) -> Count:
    """Return a count in the form of another: a host ``int`` becomes a device count where ``like`` is one."""
    return count if is_host(like) or not is_host(count) else full(like, count, like.dtype)


def write_count_(old: Any, new: Any) -> Any:
    """Return ``new``, written into the memory of ``old`` where both are counts in torch tensors of one device.

    A CUDA graph that was captured goes on from the memory of ``old`` when it is replayed. To another device it would
    be a copy that the host waits for.
    """
    torch = sys.modules.get("torch")
    if new is old or torch is None or not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    if old.device != new.device or not is_integer_array(old):
        return new
    with torch.inference_mode(not is_compiling()):  # tensors made in inference mode can only be written to in it
        old.copy_(new)
    return old


def write_counts_(before: AverageState[T], after: AverageState[T]) -> AverageState[T]:
    """Return ``after`` with its counts in the memory of those ``before``, where that can be overwritten."""
    olds, old_spec = trees.flatten(before.memory)
    news, spec = trees.flatten(after.memory)
    by_path = dict(zip(old_spec.paths(), olds, strict=True))  # a memory that was loaded may have other containers
    pairs = [(by_path.get(path), new) for path, new in zip(spec.paths(), news, strict=True)]
    takers: dict[int, Any] = {}  # of two counts that were one and are no longer, the first takes its memory
    *memory, count = [
        write_count_(old, new) if takers.setdefault(id(old), new) is new else new
        for old, new in [*pairs, (before.count, after.count)]
    ]
    return AverageState(count, after.average, trees.unflatten(spec, memory))
