"""Values that are known of tensors, as long as nobody else wrote to them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functavg.kernels.torch.dtensor import get_shard

_version = operator.attrgetter("_version")
_layout = operator.attrgetter("shape", "dtype", "device")


class Trusted:
    """Values of tensors, each trusted while its tensor is the same one, at the same version, in the same memory.

    Whoever wrote to a tensor since meant its value to go on from there. (Collectives, and writes to ``.data``, do not
    count as a new version.) Inference tensors have no version: nothing is trusted of them.
    """

    def __init__(self) -> None:
        self.keep([], [])

    def keep(self, tensors: Iterable[Tensor], values: Iterable[Any]) -> None:
        """Remember the values of these tensors, and of no others."""
        self._tensors, self._values = list(tensors), list(values)
        self._marks = _mark(self._tensors)
        self._memories = [get_shard(tensor).untyped_storage() for tensor in self._tensors]  # no address is used again

    def get(self, tensors: Sequence[Tensor]) -> list[Any] | None:
        """Return the values of exactly these tensors, None where one of them is not trusted."""
        are_known = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return self._values if are_known and _mark(self._tensors) == self._marks else None

    def by_tensor(self) -> dict[int, tuple[Tensor, Any]]:
        """Return each tensor and value that is still trusted, by the identity of the tensor."""
        then, now = zip(*self._marks, strict=True), zip(*_mark(self._tensors), strict=True)
        columns = zip(self._tensors, self._values, then, now, strict=True)
        return {id(tensor): (tensor, value) for tensor, value, old, new in columns if old == new}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is still trusted; versions are not those of a copy."""
        return {"pairs": list(self.by_tensor().values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Trust the values of the tensors as they are now."""
        self.keep([tensor for tensor, _ in state["pairs"]], [value for _, value in state["pairs"]])


def _mark(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Return what changes whenever a tensor is written to or given other memory by ``.data``, in columns.

    Nothing that is read of an inference tensor changes when it is written to: its mark is like no other.
    """
    try:
        versions = list(map(_version, tensors))
    except RuntimeError:
        versions = [object() if tensor.is_inference() else tensor._version for tensor in tensors]
    return versions, list(map(_get_address, tensors)), list(map(Tensor.stride, tensors)), list(map(_layout, tensors))


def _get_address(tensor: Tensor) -> int:
    return get_shard(tensor).data_ptr()
