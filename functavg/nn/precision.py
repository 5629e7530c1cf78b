"""Values of low-precision tensors in the precision that they are averaged in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from functavg.functional import lerp
from functavg.kernels import dtypes
from functavg.plan import identities

_dtype = operator.attrgetter("dtype")


class WideValues:
    """The averages, in float32, of tensors that hold but their rounding.

    A value is trusted only while its tensor is the same one, at the same version and in the same place: whoever wrote
    to the tensor since meant the average to go on from there. The value of a tensor that is wide enough is the tensor.

    Args:
        dtype: the dtype that averages are to be held in; ``None``: float32 where a tensor has less.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtypes.check_dtype(dtype)
        self._held: dict[int, tuple[Tensor, Any, Tensor]] = {}
        self._dtypes: dict[torch.dtype, torch.dtype] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is still trusted; versions are not those of a copy."""
        held = [(tensor, value) for tensor, mark, value in self._held.values() if mark == _mark(tensor)]
        return {"dtype": self.dtype, "held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the values over for the tensors as they are now."""
        self.dtype = state["dtype"]
        self._held, self._dtypes = {}, {}
        for tensor, value in state["held"]:
            self.put(tensor, value)

    def are_tensors(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether the value of each tensor is the tensor itself."""
        return all(self._held_dtype(dtype) == dtype for dtype in set(map(_dtype, tensors)))

    def get(self, tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the values of tensors by name, the dict itself where they are the tensors.

        A tensor of two names has one value.
        """
        if self.are_tensors(tensors.values()):
            return tensors
        distinct: dict[Hashable, Tensor] = {}
        keys = dict(zip(tensors, identities(list(tensors.values())), strict=True))
        for name, tensor in tensors.items():
            if keys[name] not in distinct:
                distinct[keys[name]] = self._value(tensor)
        return {name: distinct[key] for name, key in keys.items()}

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Remember the value of a tensor that holds its rounding by now; an inference tensor has no version to mark."""
        if not tensor.is_inference():
            self._held[id(tensor)] = (tensor, _mark(tensor), value)

    def write(self, tensors: Mapping[Any, Tensor], values: Mapping[Any, Tensor]) -> None:
        """Write the rounding of new values into their tensors, and remember the values."""
        wide = {id(tensor): name for name, tensor in tensors.items() if values[name] is not tensor}
        narrow, new = ({name: leaves[name] for name in wide.values()} for leaves in (tensors, values))
        lerp(narrow, new, 1.0, inplace=True)
        self.keep(tensors, values)

    def keep(self, tensors: Mapping[Any, Tensor], values: Mapping[Any, Tensor]) -> None:
        """Remember the values of tensors that hold their rounding by now."""
        self._held.clear()
        for name, tensor in tensors.items():
            if values[name] is not tensor:
                self.put(tensor, values[name])

    def load(self, tensor: Tensor, value: Tensor) -> None:
        """Remember a copy of a value, in the form in which this tensor's average is held, if it is the tensor's."""
        if value.shape == tensor.shape:
            dtype = self._held_dtype(tensor.dtype)
            with torch.inference_mode(False):
                self.put(tensor, value.detach().to(device=tensor.device, dtype=dtype, copy=True))

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
        self._held.clear()
        for name in tensors.keys() & before.keys():  # a conversion may have made an integer buffer averageable
            tensor, (old_dtype, value) = tensors[name], before[name]
            dtype = self._held_dtype(tensor.dtype)
            if dtype != tensor.dtype:
                moved = fn(value)  # what shares memory, or changes its format, goes on to
                self.put(tensor, moved if moved.dtype == dtype else value.to(tensor.device, dtype))
            elif value.dtype != old_dtype and not tensor.is_meta:
                tensor.copy_(value)

    def narrow(self, tensors: Iterable[Tensor]) -> None:
        """Convert tensors of more bits than the average is to be held in."""
        for tensor in tensors:
            held = dtypes.held_in(dtypes.name_of(tensor.dtype), self.dtype)
            if dtypes.kind_of(held) in (dtypes.REAL, dtypes.COMPLEX) and _bits(held) < _bits(tensor.dtype):
                tensor.data = tensor.data.to(dtypes.named(torch, held))

    def clear(self) -> None:
        """Forget all values."""
        self._held.clear()

    def _held_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that an average of tensors of this dtype is held in, never a narrower one."""
        if dtype not in self._dtypes:
            held = dtypes.held_in(dtypes.name_of(dtype), self.dtype)
            wider = held != dtypes.name_of(dtype) and _bits(held) > _bits(dtype)
            self._dtypes[dtype] = dtypes.named(torch, held) if wider else dtype
        return self._dtypes[dtype]

    def _value(self, tensor: Tensor) -> Tensor:
        _, mark, value = self._held.get(id(tensor), (None, None, None))
        dtype = self._held_dtype(tensor.dtype)
        if dtype == tensor.dtype:
            return tensor
        if value is not None and mark == _mark(tensor):
            return value
        return tensor.detach().to(dtype)


def _bits(dtype: torch.dtype | str) -> int:
    return dtypes.bits_of(dtype if isinstance(dtype, str) else dtypes.name_of(dtype))


def _mark(tensor: Tensor) -> Any:
    """Return what changes whenever a tensor is written to, moved or given other memory by ``.data``."""
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor._version, tensor.dtype, tensor.device, *layout, tensor.untyped_storage()
