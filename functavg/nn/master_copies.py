"""Averages of low-precision tensors, in the precision of the averaging."""

from __future__ import annotations

__all__: list[str] = []

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functavg.functional import lerp
from functavg.kernels import dtypes
from functavg.nn.trusted import Trusted
from functavg.plan import identities

_dtype = operator.attrgetter("dtype")


class MasterCopies:
    """The averages, in float32, of tensors that hold only their rounding.

    A master copy is trusted while its tensor is (see ``Trusted``). A tensor that is wide enough is its own master copy.

    Args:
        dtype: the dtype that averages are to be held in; ``None``: float32 where a tensor has less.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype: str | None = dtypes.check_dtype(dtype)
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        self._copies = Trusted()

    def are_tensors(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether the master copy of each tensor is the tensor itself."""
        found = set(map(_dtype, tensors))
        return found == set(map(self._held_dtype, found))

    def get(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the master copies of tensors, the list itself where they are the tensors."""
        if self.are_tensors(tensors):
            return tensors
        copies = self._copies.get(tensors)
        if copies is not None:
            return copies
        known = self._copies.by_tensor()
        made: dict[Hashable, Tensor] = {}  # tied tensors have one
        keys = identities(tensors)
        for key, tensor in zip(keys, tensors, strict=True):
            if key not in made:
                dtype = self._held_dtype(tensor.dtype)
                is_known = dtype != tensor.dtype and id(tensor) in known
                made[key] = known[id(tensor)][1] if is_known else _convert(tensor, dtype)
        return [made[key] for key in keys]

    def get_named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the master copies of tensors by name."""
        return dict(zip(tensors, self.get(list(tensors.values())), strict=True))

    def write_(self, tensors: list[Tensor], copies: list[Tensor]) -> None:
        """Write the rounding of new master copies into their tensors, and remember the copies."""
        low = {id(tensor): index for index, tensor in enumerate(tensors) if copies[index] is not tensor}
        narrow, wide = ([column[index] for index in low.values()] for column in (tensors, copies))
        lerp(narrow, wide, 1.0, inplace=True)
        self.keep(tensors, copies)

    def keep(self, tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Remember the master copies of tensors that already hold their rounding."""
        self._copies.renew(tensors, copies)

    def move(
        self,
        tensors: Mapping[str, Tensor],
        before: Mapping[str, tuple[torch.dtype, Tensor]],
        fn: Callable[[Tensor], Tensor],
    ) -> None:
        """Follow tensors that ``fn`` moved or converted: keep master copies of low-precision ones, write others back.

        Args:
            tensors: the tensors as they are now, by name.
            before: the dtypes that they had, and their unrounded values.
            fn: what was applied to each of them.
        """
        held: dict[int, tuple[Tensor, Tensor]] = {}  # tied tensors have one master copy
        for name, tensor in tensors.items():
            if name not in before or id(tensor) in held:  # a conversion may have made an integer buffer averageable
                continue
            old_dtype, value = before[name]
            dtype = self._held_dtype(tensor.dtype)
            if dtype != tensor.dtype:
                moved = fn(value)  # fn may also share memory or change its format
                master = moved if moved.dtype == dtype else value.to(tensor.device, dtype)
                held[id(tensor)] = tensor, master
                if old_dtype not in (tensor.dtype, master.dtype) and not tensor.is_meta:
                    tensor.copy_(master)  # and not the rounding of a rounding
            elif value.dtype != old_dtype and not tensor.is_meta:
                tensor.copy_(value)
        self.keep([tensor for tensor, _ in held.values()], [copy for _, copy in held.values()])

    def narrow_(self, tensors: Iterable[Tensor]) -> None:
        """Convert tensors of more bits than the average is to be held in."""
        for tensor in tensors:
            held = dtypes.held_in(dtypes.name_of(tensor.dtype), self.dtype)
            if dtypes.kind_of(held) in (dtypes.REAL, dtypes.COMPLEX) and _bits(held) < _bits(tensor.dtype):
                tensor.data = tensor.data.to(dtypes.named(torch, held))

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
    if tensor.dtype == dtype:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to(dtype)
