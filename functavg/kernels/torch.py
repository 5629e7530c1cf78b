"""Steps over torch tensors, in foreach groups of one dtype and device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from functavg.kernels import dtensor, dtypes
from functavg.scalars import is_host
from functavg.state import Count, Weight

P = ParamSpec("P")
R = TypeVar("R")

MUTABLE = True

STAGE = 2**20
"""Elements of the buffer that new values are converted through: small enough to stay in cache."""

# Asked for each leaf at each update, which names are too slow for.
_KINDS = {
    dtype: dtypes.kind_of(dtypes.name_of(dtype)) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class Group:
    """Leaves of one dtype and device: for each average its tensors, and the new ones."""

    indices: Sequence[int]
    averages: list[list[Tensor]]
    news: list[Tensor]
    alike: bool
    """Whether the new tensors have the dtype and the device of all the averages."""
    foreach: bool
    """Whether the grouped kernels know these tensors; elsewhere each leaf is a call of its own."""
    wholes: list[list[Tensor]] | None = None
    """The DTensors of which ``averages`` are the shards."""


def outside_autograd(fn: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autograd, and outside inference mode, in which a new tensor could never leave it."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return run


# ---- checks and groups


def refusal(leaf: Any) -> str | None:
    """Return why a tensor cannot be averaged, or None."""
    if isinstance(leaf, (UninitializedBuffer, UninitializedParameter)):  # is_lazy does not go through torch.compile
        return "an uninitialised (lazy) parameter; run one forward pass first"
    if leaf.is_nested:
        return "a nested tensor; average its components"
    if leaf.layout != torch.strided:
        return f"a tensor of layout {leaf.layout}; only dense tensors can be averaged (Tensor.to_dense makes one)"
    if _kind(leaf) is None:
        return f"a tensor of dtype {leaf.dtype}; dequantise or unpack it first"
    return None


def prepared(averages: list[list[Any]], news: list[Any], where: Callable[[int], str]) -> list[Group]:
    """Return the groups of leaves that belong into one call each.

    Raises:
        TypeError, ValueError: a new leaf cannot go into an average; the message names it.
    """
    transformed = _transformed()
    if not transformed and _uniform([*averages, news]):
        return [Group(range(len(news)), averages, news, alike=True, foreach=True)]
    shards = None if transformed else dtensor.shards([*averages, news])
    if shards is not None:
        return [
            replace(group, wholes=[[olds[index] for index in group.indices] for olds in averages])
            for group in prepared(shards[:-1], shards[-1], where)
        ]
    places: dict[Any, list[int]] = {}
    for index, new in enumerate(news):
        for olds in averages:
            _check(olds[index], new, functools.partial(where, index))
        key = tuple((type(leaf), leaf.dtype, leaf.device) for leaf in (*(olds[index] for olds in averages), new))
        places.setdefault(index if transformed else key, []).append(index)
    return [_group(indices, averages, news, transformed) for indices in places.values()]


def _group(indices: Sequence[int], averages: list[list[Any]], news: list[Any], transformed: bool) -> Group:
    first = [*(olds[indices[0]] for olds in averages), news[indices[0]]]
    alike = all(leaf.dtype == first[0].dtype and leaf.device == first[0].device for leaf in first)
    groups = [[leaves[index] for index in indices] for leaves in (*averages, news)]
    wholes = None
    if dtensor.is_sharded(first[0]) and not transformed:
        wholes = groups[:-1]
        groups = [[dtensor.local(leaf) for leaf in leaves] for leaves in groups]
    plain = all(type(leaves[0]) in (Tensor, Parameter) for leaves in groups)
    return Group(indices, groups[:-1], groups[-1], alike, foreach=plain and not transformed, wholes=wholes)


def _uniform(lists: list[list[Any]]) -> bool:
    """Tell, faster than leaf by leaf, whether all lists hold dense tensors of one dtype and device and equal shapes."""
    if not all(set(map(type, leaves)) <= {Tensor, Parameter} for leaves in lists):
        return False
    try:
        shapes = [[leaf.shape for leaf in leaves] for leaves in lists]
    except RuntimeError:  # a nested tensor, which has none
        return False
    return (
        all(theirs == shapes[0] for theirs in shapes[1:])
        and len({leaf.dtype for leaves in lists for leaf in leaves}) == 1
        and len({leaf.device for leaves in lists for leaf in leaves}) == 1
        and {leaf.layout for leaves in lists for leaf in leaves} == {torch.strided}
        and _kind(lists[0][0]) is not None
    )


def _transformed() -> bool:
    """Tell whether a transform is at work that has no rule for the grouped kernels: a compiler, vmap."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _kind(leaf: Tensor) -> int | None:
    return _KINDS.get(leaf.dtype)


def _check(average: Any, new: Any, where: Callable[[], str]) -> None:
    if not isinstance(new, Tensor):
        raise TypeError(f"{where()}: expected a torch tensor, got {type(new).__name__}")
    reason = refusal(average) or refusal(new)
    if reason is not None:
        raise TypeError(f"{where()}: expected a dense tensor, got {reason}")
    dtensor.check(average, new, where)
    if average.shape != new.shape:
        hint = "a parameter of size 0 is one that an engine has partitioned away, gather it first"
        raise ValueError(
            f"{where()}: expected shape {tuple(average.shape)}, got {tuple(new.shape)}; "
            + (hint if 0 in (average.numel(), new.numel()) else "nothing is broadcast")
        )
    if (_kind(new) or 0) > (_kind(average) or 0):
        raise TypeError(f"{where()}: expected {average.dtype} or what it can hold, got {new.dtype}")


# ---- new arrays


@outside_autograd
def copied(leaf: Tensor, dtype: str | None, device: Any) -> Tensor:
    """Return a new dense tensor of the values of ``leaf``, in the dtype that its average is held in."""
    held = dtypes.named(torch, dtypes.held_in(dtypes.name_of(leaf.dtype), dtype))
    return leaf.detach().resolve_conj().resolve_neg().to(device=device, dtype=held, copy=True)


@outside_autograd
def cast(leaf: Tensor, like: Tensor) -> Tensor:
    """Return ``leaf`` with the dtype and the device of ``like``; itself where it has them."""
    return leaf.to(device=like.device, dtype=like.dtype)


# ---- steps


@outside_autograd
def lerp(groups: list[Group], weights: list[Weight], inplace: bool) -> list[list[Any]]:
    """Return, for each average, its leaves after the step ``a + w (x - a)`` with its weight.

    A weight of exactly 1 copies, one of exactly 0 does nothing; integers and bools take the newest value.
    """
    if len(groups) == 1:
        return _lerp_group(groups[0], weights, inplace)
    results: list[list[Any]] = [[None] * sum(len(group.indices) for group in groups) for _ in weights]
    for group in groups:
        for result, leaves in zip(results, _lerp_group(group, weights, inplace), strict=True):
            for index, leaf in zip(group.indices, leaves, strict=True):
                result[index] = leaf
    return results


def _lerp_group(group: Group, weights: list[Weight], inplace: bool) -> list[list[Tensor]]:
    steps = [(olds, _weight_of(weight, olds[0])) for olds, weight in zip(group.averages, weights, strict=True)]
    return _unsharded(group, _step(group, steps, inplace))


def _unsharded(group: Group, results: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the DTensors of which a group's results are the shards, those of the group where they were written to."""
    if group.wholes is None:
        return results
    return [
        wholes
        if shards is olds
        else [
            whole if shard is old else dtensor.like(shard, whole)
            for shard, old, whole in zip(shards, olds, wholes, strict=True)
        ]
        for shards, olds, wholes in zip(results, group.averages, group.wholes, strict=True)
    ]


def _weight_of(weight: Weight, leaf: Tensor) -> Weight:
    """Return the weight for leaves like this one: an integer that moves at all takes the newest value."""
    if is_host(weight) and weight != 0 and _kind(leaf) in (dtypes.BOOL, dtypes.INTEGER):
        return 1
    return weight


def _step(group: Group, steps: list[tuple[list[Tensor], Weight]], inplace: bool) -> list[list[Tensor]]:
    if not group.foreach or not all(is_host(weight) for _, weight in steps):
        return [
            [lerp_leaf(old, new, weight, inplace) for old, new in zip(olds, group.news, strict=True)]
            for olds, weight in steps
        ]
    if group.alike and not inplace:
        return [_new_lists(olds, group.news, weight) for olds, weight in steps]
    if not inplace:
        steps = [([old.clone() for old in olds] if weight != 0 else olds, weight) for olds, weight in steps]
    moving = [(olds, weight) for olds, weight in steps if weight != 0]
    with torch.inference_mode():  # spares the dispatcher's bookkeeping; versions still bump
        if group.alike:
            for olds, weight in moving:
                _write(olds, group.news, weight)
        elif moving:
            _write_staged(moving, group.news)
    return [olds for olds, _ in steps]


def lerp_leaf(old: Tensor, new: Tensor, weight: Weight, inplace: bool) -> Tensor:
    """Return one leaf after the step: the readable reference of the grouped paths, and the path of transforms."""
    if not is_host(weight):
        return _lerp_leaf_selected(old, new, weight, inplace)
    if weight == 0:
        return old
    if weight == 1:
        return old.copy_(new) if inplace else new.to(old.device, old.dtype, copy=True)
    result = torch.lerp(old, new.to(old.device, old.dtype), weight)  # vmap has no rule for lerp_
    return old.copy_(result) if inplace else result


def _lerp_leaf_selected(old: Tensor, new: Tensor, weight: Tensor, inplace: bool) -> Tensor:
    """Return one leaf after a step whose weight only the device knows."""
    weight = weight.to(old.device)
    if _kind(old) in (dtypes.BOOL, dtypes.INTEGER):
        result = torch.where(weight == 0, old, new.to(old.device, old.dtype))
    else:
        low = not old.is_complex() and old.dtype.itemsize < 4
        start = old.to(torch.float32) if low else old
        new = new.to(old.device, start.dtype)
        moved = torch.lerp(start, new, weight.to(start.dtype))
        result = torch.where(weight == 1, new, torch.where(weight == 0, start, moved)).to(old.dtype)
    return old.copy_(result) if inplace else result


def _new_lists(olds: list[Tensor], news: list[Tensor], weight: float) -> list[Tensor]:
    if weight == 0:
        return olds
    if weight == 1:
        return [torch.empty_like(old, requires_grad=False).copy_(new) for old, new in zip(olds, news, strict=True)]
    return list(torch._foreach_lerp(olds, news, weight))


def _write(olds: list[Tensor], news: list[Tensor], weight: float) -> None:
    if weight == 1:
        torch._foreach_copy_(olds, news)
    else:
        torch._foreach_lerp_(olds, news, weight)


def _write_staged(steps: list[tuple[list[Tensor], float]], news: list[Tensor]) -> None:
    """Write the steps, converting new values through one small buffer that all averages of one dtype then read."""
    if all(weight == 1 for _, weight in steps):
        for olds, _ in steps:
            torch._foreach_copy_(olds, news)
        return
    for dtype, device in dict.fromkeys((olds[0].dtype, olds[0].device) for olds, _ in steps):
        mine = [(olds, weight) for olds, weight in steps if (olds[0].dtype, olds[0].device) == (dtype, device)]
        stage = torch.empty(min(STAGE, sum(new.numel() for new in news)), dtype=dtype, device=device)
        for pieces, new_pieces in _batches([olds for olds, _ in mine], news):
            staged = torch._C._nn.unflatten_dense_tensors(stage, new_pieces)
            torch._foreach_copy_(staged, new_pieces)
            for olds, (_, weight) in zip(pieces, mine, strict=True):
                _write(olds, staged, weight)


def _batches(averages: list[list[Tensor]], news: list[Tensor]) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Yield the leaves, large ones in pieces, in batches that fit into the staging buffer together."""
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for leaves in zip(*averages, news, strict=True):
        for piece in _pieces(leaves):
            numel = piece[-1].numel()
            if size + numel > STAGE:
                *olds, new = map(list, zip(*batch, strict=True))
                yield olds, new
                batch, size = [], 0
            batch.append(piece)
            size += numel
    if batch:
        *olds, new = map(list, zip(*batch, strict=True))
        yield olds, new


def _pieces(leaves: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of several tensors of one shape, none larger than the staging buffer."""
    shape = leaves[0].shape
    numel = shape.numel()
    if numel <= STAGE:
        yield leaves
    elif len(shape) > 1 and all(leaf.stride() == leaves[0].stride() for leaf in leaves) and _dense(leaves[0]):
        order = sorted(range(len(shape)), key=leaves[0].stride, reverse=True)
        yield from _pieces(tuple(leaf.permute(order).reshape(-1) for leaf in leaves))
    else:
        dim = max(range(len(shape)), key=lambda dim: shape[dim])
        length = max(1, STAGE * shape[dim] // numel)
        for parts in zip(*(torch.split(leaf, length, dim) for leaf in leaves), strict=True):
            yield from _pieces(parts)


def _dense(leaf: Tensor) -> bool:
    """Tell whether some order of its dimensions makes a tensor contiguous, so that it can be flattened as a view."""
    order = sorted(range(leaf.ndim), key=leaf.stride, reverse=True)
    return leaf.permute(order).is_contiguous()


# ---- finiteness


@outside_autograd
def finite(leaves: list[Tensor]) -> Tensor | bool:
    """Return whether real and complex leaves hold no NaN and no infinity, as a 0-d tensor; ``True`` if there are none.

    Both show in the extrema of a leaf, which take one pass and no temporary.
    """
    grouped = not _transformed()
    groups: dict[Any, list[Tensor]] = {}
    for leaf in map(dtensor.local, leaves):
        if leaf.numel() > 0:
            groups.setdefault((leaf.dtype, leaf.device, type(leaf) in (Tensor, Parameter)), []).append(leaf)
    flags = [
        torch.stack(_extrema(group, grouped and plain)).isfinite().all()
        for (_, device, plain), group in groups.items()
        if _kind(group[0]) in (dtypes.REAL, dtypes.COMPLEX) and device.type != "meta"
    ]
    flag = functools.reduce(lambda flag, other: flag & other.to(flag.device), flags) if flags else True
    return dtensor.agreed(flag, leaves)


def _extrema(leaves: list[Tensor], grouped: bool) -> list[Tensor]:
    """Return numbers, not finite if an element of the leaves is not: norms on CUDA, elsewhere smallest and largest.

    On a CPU those take a sixth of the time of the norm. Small leaves are looked at together, as they cost a call each.
    """
    if leaves[0].is_complex():
        leaves = [torch.view_as_real(leaf.resolve_conj()) for leaf in leaves]
    narrow = leaves[0].dtype.itemsize == 1  # no reduction knows float8
    if grouped and leaves[0].is_cuda and not narrow:
        return list(torch._foreach_norm(leaves, torch.inf))
    if grouped and not narrow:
        batches = (batch for _, batch in _batches([], leaves))
        leaves = [batch[0] if len(batch) == 1 else torch._C._nn.flatten_dense_tensors(batch) for batch in batches]
    return [number for leaf in leaves for number in torch.aminmax(leaf.to(torch.bfloat16) if narrow else leaf)]


# ---- steps by a user's function


@outside_autograd
def apply(
    groups: list[Group],
    count: Count,
    fn: Callable[..., Any],
    grouped: bool,
    inplace: bool,
    where: Callable[[int], str],
) -> list[Any]:
    """Return the leaves of one average after ``fn(avg, new, count)``, or ``fn(avgs, news, count)`` by groups in place.

    The function sees real and complex tensors only, in one dtype; integers and bools take the newest value.
    """
    result: list[Any] = [None] * sum(len(group.indices) for group in groups)
    counts: dict[torch.device, Tensor] = {}
    for group in groups:
        (olds,) = group.averages
        if _kind(olds[0]) in (dtypes.BOOL, dtypes.INTEGER):
            leaves = [lerp_leaf(old, new, 1, inplace) for old, new in zip(olds, group.news, strict=True)]
        else:
            device = olds[0].device
            if device not in counts:
                counts[device] = torch.full((), count, device=device) if is_host(count) else count.to(device)
            call = _apply_grouped if grouped else _apply_each
            with _outside_autocast(device):
                leaves = call(group, counts[device], fn, inplace, where)
            if not is_host(count):  # only the device knows whether this is the first model, which is copied
                first = counts[device] == 0
                leaves = [lerp_leaf(leaf, new, first, inplace) for leaf, new in zip(leaves, group.news, strict=True)]
        for index, leaf in zip(group.indices, _unsharded(group, [leaves])[0], strict=True):
            result[index] = leaf
    return result


def _outside_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _apply_each(
    group: Group, count: Tensor, fn: Callable[..., Any], inplace: bool, where: Callable[[int], str]
) -> list[Tensor]:
    leaves = []
    for index, old, new in zip(group.indices, group.averages[0], group.news, strict=True):
        old = old.detach()
        # float8 takes part in no promotion, and every average can hold what has one byte
        common = old.dtype if new.dtype.itemsize == 1 else torch.promote_types(old.dtype, new.dtype)
        moved = fn(old.to(common), new.detach().to(old.device, common), count)
        if not isinstance(moved, Tensor) or moved.shape != old.shape:
            got = f"shape {tuple(moved.shape)}" if isinstance(moved, Tensor) else type(moved).__name__
            raise ValueError(
                f"{where(index)}: avg_fn must return the new average, a tensor of shape {tuple(old.shape)}, got {got}"
            )
        leaves.append(old.copy_(moved) if inplace else moved.to(old.device, old.dtype, copy=True))
    return leaves


def _apply_grouped(
    group: Group, count: Tensor, fn: Callable[..., Any], inplace: bool, where: Callable[[int], str]
) -> list[Tensor]:
    del where
    olds = [old.detach() if inplace else old.detach().clone() for old in group.averages[0]]
    news = [new.detach().to(old.device, old.dtype) for old, new in zip(olds, group.news, strict=True)]
    fn(olds, news, count)
    return olds
