"""Values that are known for tensors until somebody else writes to these."""

from __future__ import annotations

__all__: list[str] = []

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functavg.kernels.torch.dtensor import get_shard
from functavg.kernels.torch.groups import PLAIN

_version = operator.attrgetter("_version")
_layout = operator.attrgetter("shape", "dtype", "device")


class Trusted:
    """Values of tensors, each trusted while its tensor is the same one, at the same version, in the same memory.

    Where somebody wrote to a tensor since, what was written counts. (Collectives, and writes to ``.data``, do not make
    a new version.) Inference tensors have no version, so their values are never trusted.
    """

    def __init__(self) -> None:
        self.keep([], [])

    def keep(self, tensors: Iterable[Tensor], values: Iterable[Any]) -> None:
        """Remember the values of these tensors, and of no others."""
        self._tensors, self._values = list(tensors), list(values)
        self._marks = _mark(self._tensors)
        self._memories = list(map(Tensor.untyped_storage, _get_shards(self._tensors)))  # so that no address is reused

    def renew(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> None:
        """Remember the values that ``get`` has just returned, for the new versions of their tensors."""
        if values is self._values and self._are(tensors):
            self._marks = (_get_versions(self._tensors), *self._marks[1:])
        else:
            self.keep(tensors, values)

    def get(self, tensors: Sequence[Tensor]) -> list[Any] | None:
        """Return the values of exactly these tensors, None if one of them is not trusted."""
        return self._values if self._are(tensors) and _mark(self._tensors) == self._marks else None

    def _are(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    def by_tensor(self) -> dict[int, tuple[Tensor, Any]]:
        """Return each tensor and value that is still trusted, by the ``id`` of the tensor."""
        then, now = zip(*self._marks, strict=True), zip(*_mark(self._tensors), strict=True)
        columns = zip(self._tensors, self._values, then, now, strict=True)
        return {id(tensor): (tensor, value) for tensor, value, old, new in columns if old == new}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is still trusted, without versions, which a copy does not have."""
        return {"pairs": list(self.by_tensor().values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Trust the values of the tensors as they are now."""
        self.keep([tensor for tensor, _ in state["pairs"]], [value for _, value in state["pairs"]])


def _mark(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Return, in columns, what changes whenever a tensor is written to or gets other memory by ``.data``."""
    addresses, strides = list(map(Tensor.data_ptr, _get_shards(tensors))), list(map(Tensor.stride, tensors))
    return _get_versions(tensors), addresses, strides, list(map(_layout, tensors))


def _get_versions(tensors: list[Tensor]) -> list[Any]:
    """Return the version of each tensor; an inference tensor has none and gets a new object, which equals no other."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [object() if tensor.is_inference() else tensor._version for tensor in tensors]


def _get_shards(tensors: list[Tensor]) -> list[Tensor]:
    return tensors if PLAIN.issuperset(map(type, tensors)) else list(map(get_shard, tensors))
