"""Averages of low-precision tensors in the precision that they are averaged in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from functavg.functional import lerp
from functavg.kernels import dtypes
from functavg.kernels.torch.dtensor import get_shard
from functavg.plan import identities

_dtype = operator.attrgetter("dtype")
_version = operator.attrgetter("_version")
_layout = operator.attrgetter("shape", "dtype", "device")


class MasterCopies:
    """The averages, in float32, of tensors that hold but their rounding.

    A master copy is trusted only while its tensor is the same one, at the same version and in the same memory: whoever
    wrote to the tensor since meant the average to go on from there. The master copy of a tensor that is wide enough is
    the tensor.

    Args:
        dtype: the dtype that averages are to be held in; ``None``: float32 where a tensor has less.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtypes.check_dtype(dtype)
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is still trusted; versions are not those of a copy."""
        known = self._trusted()
        held = [(tensor, known[id(tensor)]) for tensor in self._tensors if id(tensor) in known]
        return {"dtype": self.dtype, "held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the copies over for the tensors as they are now."""
        self.dtype, self._dtypes = state["dtype"], {}
        self.keep([tensor for tensor, _ in state["held"]], [copy for _, copy in state["held"]])

    def are_tensors(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether the master copy of each tensor is the tensor itself."""
        return all(self._held_dtype(dtype) == dtype for dtype in set(map(_dtype, tensors)))

    def get(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the master copies of tensors, the list itself where they are the tensors."""
        if self.are_tensors(tensors):
            return tensors
        are_known = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if are_known and _mark(tensors) == self._marks:
            return self._copies
        known = self._trusted()
        made: dict[Hashable, Tensor] = {}  # what is tied has one
        for key, tensor in zip(identities(tensors), tensors, strict=True):
            if key not in made:
                dtype = self._held_dtype(tensor.dtype)
                copy = tensor if dtype == tensor.dtype else known.get(id(tensor))
                made[key] = _convert(tensor, dtype) if copy is None else copy
        return [made[key] for key in identities(tensors)]

    def get_named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the master copies of tensors by name."""
        return dict(zip(tensors, self.get(list(tensors.values())), strict=True))

    def write_(self, tensors: list[Tensor], copies: list[Tensor]) -> None:
        """Write the rounding of new master copies into their tensors, and remember the copies."""
        low = {id(tensor): index for index, tensor in enumerate(tensors) if copies[index] is not tensor}
        narrow, wide = ([column[index] for index in low.values()] for column in (tensors, copies))
        lerp(narrow, wide, 1.0, inplace=True)
        self.keep(tensors, copies)

    def keep(self, tensors: list[Tensor], copies: list[Tensor]) -> None:
        """Remember the master copies of tensors that hold their rounding by now."""
        self._tensors, self._copies = list(tensors), list(copies)
        self._marks = _mark(tensors)
        self._memories = [tensor.untyped_storage() for tensor in tensors]  # alive, so that no address is used again

    def load(self, values: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Remember copies of values for tensors that hold their rounding, beside what is known of other tensors."""
        known = self._trusted()
        held = {id(tensor): (tensor, known[id(tensor)]) for tensor in self._tensors if id(tensor) in known}
        for tensor, value in values:
            if value.shape == tensor.shape:
                with torch.inference_mode(False):
                    copy = value.detach().to(device=tensor.device, dtype=self._held_dtype(tensor.dtype), copy=True)
                held[id(tensor)] = tensor, copy
        self.keep([tensor for tensor, _ in held.values()], [copy for _, copy in held.values()])

    def _trusted(self) -> dict[int, Tensor]:
        """Return the master copies that are still trusted, by the identity of their tensors."""
        then, now = zip(*self._marks, strict=True), zip(*_mark(self._tensors), strict=True)
        columns = zip(self._tensors, self._copies, then, now, strict=True)
        return {id(tensor): copy for tensor, copy, old, new in columns if old == new and copy is not tensor}

    def move(
        self,
        tensors: Mapping[str, Tensor],
        before: Mapping[str, tuple[torch.dtype, Tensor]],
        fn: Callable[[Tensor], Tensor],
    ) -> None:
        """Follow tensors that ``fn`` moved or converted: keep wide values of low-precision ones, return them to others.

        Args:
            tensors: the tensors as they are now, by name.
            before: the dtypes and values that they had.
            fn: what was applied to each of them.
        """
        held: dict[int, tuple[Tensor, Tensor]] = {}  # what is tied has one master copy
        for name, tensor in tensors.items():
            if name not in before or id(tensor) in held:  # a conversion may have made an integer buffer averageable
                continue
            old_dtype, value = before[name]
            dtype = self._held_dtype(tensor.dtype)
            if dtype != tensor.dtype:
                moved = fn(value)  # what shares memory, or changes its format, goes on to
                held[id(tensor)] = tensor, moved if moved.dtype == dtype else value.to(tensor.device, dtype)
            elif value.dtype != old_dtype and not tensor.is_meta:
                tensor.copy_(value)
        self.keep([tensor for tensor, _ in held.values()], [copy for _, copy in held.values()])

    def narrow(self, tensors: Iterable[Tensor]) -> None:
        """Convert tensors of more bits than the average is to be held in."""
        for tensor in tensors:
            held = dtypes.held_in(dtypes.name_of(tensor.dtype), self.dtype)
            if dtypes.kind_of(held) in (dtypes.REAL, dtypes.COMPLEX) and _bits(held) < _bits(tensor.dtype):
                tensor.data = tensor.data.to(dtypes.named(torch, held))

    def clear(self) -> None:
        """Forget all master copies."""
        self.keep([], [])

    def _held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that an average of tensors of this dtype is held in, never a narrower one."""
        if dtype not in self._dtypes:
            held = dtypes.held_in(dtypes.name_of(dtype), self.dtype)
            wider = held != dtypes.name_of(dtype) and _bits(held) > _bits(dtype)
            self._dtypes[dtype] = dtypes.named(torch, held) if wider else dtype
        return self._dtypes[dtype]


def _bits(dtype: torch.dtype | str) -> int:
    return dtypes.bits_of(dtype if isinstance(dtype, str) else dtypes.name_of(dtype))


def _convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to(dtype)


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
