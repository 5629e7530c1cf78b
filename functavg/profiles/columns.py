"""The weights of all updates of a weight rule, by one call of its formula where it allows that."""

from __future__ import annotations

__all__: list[str] = []

import math
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from functavg.checks import check_weight
from functavg.progress import Progress, track
from functavg.rules.base import WeightRule

SAMPLES = 64
"""So many weights are compared with those of host counts; runs that are shorter take these alone."""


class Column(NDArrayOperatorsMixin):
    """The counts of all updates in place of one of them.

    To a formula it is a 0-d array on a device: it can be computed with, and not be read. So each rule that takes a
    device count takes a column, and one that branches on the count raises.
    """

    ndim = 0
    shape: tuple[()] = ()

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        result = ufunc(*map(_unwrap, inputs))
        return tuple(map(Column, result)) if isinstance(result, tuple) else Column(result)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        del api_version
        return _NAMESPACE

    def __bool__(self) -> bool:
        raise TypeError("a column of counts has no truth value")


class _Namespace:
    """What formulas ask of an array library; the functions of numpy that are ufuncs take columns as they are."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def where(self, condition: Any, x: Any, y: Any) -> Column:
        return Column(np.where(*map(_unwrap, (condition, x, y))))

    def astype(self, x: Column, dtype: Any, *, copy: bool = True) -> Column:
        return Column(x.values.astype(dtype, copy=copy))

    def __array_namespace_info__(self) -> _Namespace:
        return self

    def default_dtypes(self) -> dict[str, Any]:
        return {"real floating": np.float64, "integral": np.int64}


_NAMESPACE = _Namespace()


def weigh(rule: WeightRule, gaps: NDArray[np.int64], progress: Progress = False) -> NDArray[np.float64]:
    """Return the weight of the newest iterate at each update of a run.

    Raises:
        TypeError, ValueError: the rule gives something that is not a weight.
    """
    counts = np.cumsum(gaps) - gaps
    weights = _weigh_at_once(rule, counts, gaps) if len(gaps) > SAMPLES else None
    if weights is None:
        pairs = track(
            zip(counts.tolist(), gaps.tolist(), strict=True), progress, total=len(gaps), description="weights"
        )
        weights = np.array([_weigh(rule, count, gap) for count, gap in pairs], np.float64)
    return weights


def _weigh_at_once(rule: WeightRule, counts: NDArray[np.int64], gaps: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return all weights by one call, None if the formula does not take columns, or means something else by them.

    Rules check what the host knows, and no value on a device: where a weight is out of [0, 1], hosts have to tell.
    """
    try:
        with np.errstate(all="ignore"):
            found = _unwrap(rule.weight(Column(counts.astype(np.float64)), Column(gaps.astype(np.float64))))
        weights = np.broadcast_to(np.asarray(found, dtype=np.float64), counts.shape)
        if not ((weights >= 0) & (weights <= 1)).all():
            return None
        for index in _choose_samples(len(counts)):
            weight = _weigh(rule, int(counts[index]), int(gaps[index]))
            if not math.isclose(weight, weights[index], rel_tol=1e-9, abs_tol=1e-12):
                return None
    except Exception:  # whatever a formula raises on what it was not written for; the host's counts tell what is wrong
        return None
    return weights


def _weigh(rule: WeightRule, count: int, gap: int) -> float:
    return float(check_weight(rule.weight(count, gap)))


def _choose_samples(size: int) -> list[int]:
    """Return indices at even distances and, for what is special early in a run, at growing ones."""
    even = np.linspace(0, size - 1, SAMPLES // 2)
    growing = np.geomspace(1, size, SAMPLES // 2) - 1
    indices: list[int] = np.unique(np.concatenate([even, growing]).astype(int)).tolist()
    return indices


def _unwrap(x: Any) -> Any:
    return x.values if isinstance(x, Column) else x
