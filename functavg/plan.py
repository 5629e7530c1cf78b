"""Plans: what an update intends, checked as a whole and then carried out.

A rule touches no array. It returns the next state, in which what changes is an intention over whole trees.
``run`` checks every intention before the first write, then hands the leaves to the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functavg import kernels, trees
from functavg.checks import check_weight
from functavg.identity import objects
from functavg.kernels import dtypes
from functavg.scalars import is_compiling, is_host
from functavg.state import Count, PyTree, Weight


@dataclass(frozen=True, eq=False)
class Lerp:
    """The intention ``old + weight * (new - old)``; ``old`` may be an intention itself, carried out before.

    A tree of torch tensors ``narrow`` takes the rounding of the result, in place.
    """

    old: PyTree | Lerp
    new: PyTree
    weight: Weight
    narrow: PyTree | None = None


@dataclass(frozen=True, eq=False)
class Apply:
    """The intention ``fn(old, new, count)`` leaf by leaf, or ``fn(olds, news, count)`` in place by groups."""

    old: PyTree
    new: PyTree
    count: Count
    fn: Callable[..., Any]
    grouped: bool = False


Intention = (Lerp, Apply)

_LEAVES = {"torch", "numpy"}
"""Kernels of arrays that are no containers, as those of the Array API may be."""


def run(planned: PyTree, *, inplace: bool = False) -> PyTree:
    """Carry out a plan: return it with every intention replaced by its result.

    Args:
        planned: any tree with intentions among its leaves, most often an ``AverageState``.
        inplace: whether the memory of what is old may be reused, where it is mutable.

    Raises:
        TypeError, ValueError: an intention does not fit; nothing was written.
    """
    return checked(planned, inplace=inplace)()


def checked(planned: PyTree, *, inplace: bool = False) -> Callable[[], PyTree]:
    """Check a plan; return the function that carries it out, as ``run`` does.

    Raises:
        TypeError, ValueError: an intention does not fit.
    """
    nodes, spec = trees.flatten(planned)
    flat: list[Any] = []
    jobs = {index: _Job(node, flat, inplace) for index, node in enumerate(nodes) if isinstance(node, Intention)}
    batches = _batches([part for job in jobs.values() for part in job.parts])
    for batch in batches:
        batch[0].prepare([part.olds for part in batch], inplace)

    def carry_out() -> PyTree:
        for batch in batches:
            batch[0].carry_out(batch, inplace)
        for index, job in jobs.items():
            nodes[index] = job.result()
        return trees.unflatten(spec, nodes)

    return carry_out


class _Job:
    """One intention with its trees flattened, paired by path and divided into parts of one kernel."""

    def __init__(self, intention: Lerp | Apply, flat: list[Any], inplace: bool) -> None:
        steps, self.tree = _chain(intention)
        self.apply = intention if isinstance(intention, Apply) else None
        self.olds, self.spec = _flatten(self.tree, flat)
        self.steps = [(self._aligned(new, flat), weight) for new, weight in steps]
        narrow = intention.narrow if isinstance(intention, Lerp) else None
        self.narrow = [] if narrow is None else [self._aligned(narrow, flat)]
        self.parts = self._whole() or self._divided(inplace)

    def _aligned(self, tree: PyTree, flat: list[Any]) -> list[Any]:
        leaves, spec = _flatten(tree, flat)
        return trees.align(self.spec, spec, leaves)

    def where(self, index: int) -> str:
        """Return the path of a leaf."""
        return trees.paths(self.spec)[index]

    def result(self) -> PyTree:
        """Return the tree after all parts were carried out; the old one itself where no leaf is a new object."""
        leaves = list(self.olds)
        parts, self.parts = self.parts, []  # parts know their job: without this, arrays would wait for the collector
        for part in parts:
            if part.places is None:
                leaves = list(part.results)
                continue
            for indices, leaf in zip(part.places, part.results, strict=True):
                for index in indices:
                    leaves[index] = leaf
        if all(map(operator.is_, leaves, self.olds)):
            return self.tree
        return trees.unflatten(self.spec, leaves)

    def _whole(self) -> list[_Part] | None:
        """Return one part with all leaves, where one kernel takes them all and none shares memory."""
        names = {kernels.kernel_name_of(kind) for kind in set(map(type, self.olds))}
        if len(names) != 1 or None in names:
            return None
        kernel = kernels.load(names.pop())
        if len(set(kernel.identities(self.olds))) != len(self.olds):
            return None
        return [_Part(self, kernel, None, self.olds, self.steps, self.narrow)]

    def _divided(self, inplace: bool) -> list[_Part]:
        """Return the parts, with each pair of the same two mutable arrays once.

        Raises:
            TypeError: the average holds something that is no array.
            ValueError: in place, where the average shares one array and the params do not.
        """
        places: dict[str, dict[Hashable, list[int]]] = {}
        holders: dict[Hashable, int] = {}
        mine, *theirs = map(identities, (self.olds, *(leaves for leaves, _ in self.steps), *self.narrow))
        for index, old in enumerate(self.olds):
            name = kernels.kernel_name(old)
            if name is None:
                raise TypeError(f"{self.where(index)}: the average holds {type(old).__name__}, which is no array")
            first = holders.setdefault(mine[index], index)
            if inplace and any(keys[first] != keys[index] for keys in theirs):
                raise ValueError(
                    f"{self.where(first)} and {self.where(index)} share one array in the average, but not in the "
                    "params; a step in place would mix them. Tie them in the params, or part them in the average: an "
                    "update with inplace=False does, and so do a new `init` and a new AveragedModel"
                )
            pair = (mine[index], *(keys[index] for keys in theirs))
            places.setdefault(name, {}).setdefault(pair, []).append(index)
        parts = []
        for name, pairs in places.items():
            firsts = [indices[0] for indices in pairs.values()]
            olds, *others = [
                [leaves[index] for index in firsts]
                for leaves in (self.olds, *(leaves for leaves, _ in self.steps), *self.narrow)
            ]
            steps = [(news, weight) for news, (_, weight) in zip(others, self.steps, strict=False)]
            narrow = others[len(steps) :]
            parts.append(_Part(self, kernels.load(name), list(pairs.values()), olds, steps, narrow))
        return parts


@dataclass(eq=False)
class _Part:
    """Those distinct leaves of an intention that one kernel takes."""

    job: _Job
    kernel: Any
    places: Sequence[Sequence[int]] | None  # of each leaf in the job; None: the leaves are all those of the job
    olds: list[Any]
    steps: list[tuple[list[Any], Weight]]
    narrow: list[list[Any]]  # nothing, or the leaves that take the rounding of the last step
    groups: list[Any] = field(default_factory=list)  # for each step
    results: Sequence[Any] = ()

    def where(self, index: int) -> str:
        """Return the path of a leaf."""
        return self.job.where(index if self.places is None else self.places[index][0])

    def prepare(self, averages: list[list[Any]], inplace: bool) -> None:
        """Check that the averages can take all that is to go into them."""
        lists = [*averages, *self.narrow]
        self.groups = [self.kernel.prepared(lists, news, self.where, inplace) for news, _ in self.steps]

    def carry_out(self, batch: list[_Part], inplace: bool) -> None:
        """Carry out this part, and those batched with it, which read the same new leaves."""
        if self.job.apply is not None:
            apply = self.job.apply
            self.results = self.kernel.apply(self.groups[0], apply.count, apply.fn, apply.grouped, inplace, self.where)
            return
        results = self.kernel.lerp(self.groups[0], [part.steps[0][1] for part in batch], inplace)
        for part, leaves in zip(batch, results, strict=True):
            part.results = leaves
        for (news, weight), groups in zip(self.steps[1:], self.groups[1:], strict=True):
            if not all(map(operator.is_, self.results, self.olds)):  # the step before made new leaves
                groups = self.kernel.prepared([list(self.results), *self.narrow], news, self.where)
            (self.results,) = self.kernel.lerp(groups, [weight], True)


def _flatten(tree: PyTree, flat: list[Any]) -> tuple[list[Any], Any]:
    """Flatten a tree once, however many intentions name it."""
    if is_compiling():  # to the compiler of torch 2.10 dicts have no identity
        return trees.flatten(tree)
    for known, leaves, spec in flat:
        if known is tree:
            return leaves, spec
    if type(tree) is dict and {kernels.kernel_name_of(kind) for kind in set(map(type, tree.values()))} <= _LEAVES:
        leaves, spec = list(tree.values()), trees.Flat(tuple(tree))
    else:
        leaves, spec = trees.flatten(tree)
    flat.append((tree, leaves, spec))
    return leaves, spec


def _chain(intention: Lerp | Apply) -> tuple[list[tuple[PyTree, Weight]], PyTree]:
    """Return the steps of nested intentions in the order in which they are taken, and what they start from.

    Steps that a host weight of 0 closes are left out, so that a first step in a chain makes new arrays.
    """
    if isinstance(intention, Apply):
        return [(intention.new, 1)], intention.old
    steps: list[tuple[PyTree, Weight]] = []
    node: Any = intention
    while isinstance(node, Lerp):
        steps.append((node.new, check_weight(node.weight)))
        node = node.old
    steps.reverse()
    moving = [(new, weight) for new, weight in steps if not (is_host(weight) and weight == 0)]
    return moving or steps[-1:], node


def _batches(parts: list[_Part]) -> list[list[_Part]]:
    """Return the parts, those together that take one step towards the same new leaves."""
    if len(parts) == 1:
        return [parts]
    batches: dict[Hashable, list[_Part]] = {}
    for part in parts:
        alone = part.job.apply is not None or len(part.steps) != 1 or part.narrow
        key: Hashable = id(part) if alone else (part.kernel.__name__, *objects(part.steps[0][0]))
        batches.setdefault(key, []).append(part)
    return list(batches.values())


def copied(params: PyTree, *, dtype: Any = None, device: Any = None) -> PyTree:
    """Return a tree of new arrays to start an average from; mutable arrays that are shared stay shared.

    Raises:
        TypeError: a leaf cannot be averaged; the message names it.
    """
    held = dtypes.check_dtype(dtype)
    leaves, spec = trees.flatten(params)
    for index, leaf in enumerate(leaves):
        name = kernels.kernel_name(leaf)
        reason = "it is no array" if name is None else kernels.load(name).refusal(leaf)
        if reason is not None:
            raise TypeError(_refused(trees.paths(spec)[index], leaf, reason))
    made: dict[Hashable, Any] = {}
    keys = identities(leaves)
    for key, leaf in zip(keys, leaves, strict=True):
        if key not in made:
            made[key] = kernels.load(kernels.kernel_name(leaf)).copied(leaf, held, device)
    return trees.unflatten(spec, [made[key] for key in keys])


def _refused(path: str, leaf: Any, reason: str) -> str:
    advice = "leave it out of the params"
    if hasattr(leaf, "named_parameters"):
        advice = "pass dict(module.named_parameters()), or use functavg.AveragedModel"
    return f"{path}: cannot average {type(leaf).__name__}: {reason}. Expected a dense array of numbers; {advice}"


def identities(leaves: Sequence[Any]) -> list[Hashable]:
    """Return what is equal for leaves in one place of memory that can be written to, and differs for all others."""
    keys: list[Hashable] = [(index,) for index in range(len(leaves))]
    kinds = [kernels.kernel_name(leaf) for leaf in leaves]
    for kind in dict.fromkeys(kinds):
        places = [index for index, name in enumerate(kinds) if name == kind]
        found = [] if kind is None else kernels.load(kind).identities([leaves[index] for index in places])
        for index, key in zip(places, found, strict=False):
            keys[index] = (kind, key)
    return keys
