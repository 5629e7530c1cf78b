"""Which tensors are aliased, and which averages a step in place can write to."""

from __future__ import annotations

__all__: list[str] = []

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from functavg.kernels import memory
from functavg.kernels.torch.dtensor import get_shard
from functavg.kernels.torch.groups import PLAIN, is_transformed

_nbytes = operator.attrgetter("nbytes")


def are_disjoint(leaves: list[Tensor], starts: list[int]) -> bool:
    """Tell whether dense tensors at these addresses, none empty, all lie apart; False also if one look cannot tell."""
    is_contiguous = all(map(Tensor.is_contiguous, leaves))
    if not is_contiguous and any(map(is_expanded, leaves)):
        return False
    return memory.are_disjoint(starts, map(_nbytes if is_contiguous else _reach, leaves))


def identities(leaves: Sequence[Any]) -> Sequence[Hashable]:
    """Return a key for each tensor, equal for aliased ones: two objects may be one weight, as in a state_dict."""
    if torch.compiler.is_compiling():  # addresses would become constants
        return leaves
    if is_transformed():
        return list(map(id, leaves))
    return list(map(_identity, leaves))


def _identity(leaf: Any) -> Hashable:
    if not _has_address(leaf):
        return id(leaf)
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def check_writable(averages: Sequence[Any], news: Sequence[Any], name_of: Callable[[int], str]) -> None:
    """Check that each average has memory of its own to write to, which no other average or new value overlaps.

    Args:
        averages: distinct averages.
        news: an empty list, or the new value of each.
        name_of: returns the path of a leaf.

    Raises:
        TypeError: an average is an expanded tensor.
        ValueError: two overlap; the message names both.
    """
    averages, news = list(map(get_shard, averages)), list(map(get_shard, news))
    for index, leaf in enumerate(averages):
        if is_expanded(leaf):
            raise TypeError(
                f"{name_of(index)}: expected an average with memory for each element, got an expanded tensor, which "
                "cannot be written to in place; pass its clone(), or inplace=False"
            )
    others = [
        None if _identity(new) == _identity(old) else _footprint(new) for old, new in zip(averages, news, strict=False)
    ]
    memory.check_overlaps(list(map(_footprint, averages)), others, name_of)


def _footprint(leaf: Any) -> NDArray[Any] | None:
    if not _has_address(leaf):
        return None
    size = leaf.element_size()
    return memory.footprint(leaf.data_ptr(), leaf.shape, [size * stride for stride in leaf.stride()], size)


def _has_address(leaf: Any) -> bool:
    """Tell whether a leaf is a plain dense tensor with memory: those on the meta device have none."""
    return type(leaf) in PLAIN and not leaf.is_nested and leaf.layout == torch.strided and leaf.data_ptr() != 0


def is_expanded(leaf: Any) -> bool:
    """Tell whether several elements of a tensor are one in memory."""
    if leaf.is_nested or leaf.layout != torch.strided or is_lazy(leaf) or leaf.numel() == 0:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True))


def _reach(leaf: Tensor) -> int:
    """Return the bytes from the first element of a tensor that has some to the end of its last one."""
    if leaf.is_contiguous():
        return leaf.nbytes
    last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return (last + 1) * leaf.element_size()
