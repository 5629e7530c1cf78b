"""Plans: what an update intends, checked as a whole and then committed.

A rule touches no array. It returns the next state, in which what changes is an intention over whole trees.
``run`` checks every intention before the first write, then hands the leaves to the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functavg import kernels, trees
from functavg.advice import advise
from functavg.checks import check_weight
from functavg.identity import objects
from functavg.kernels import dtypes
from functavg.scalars import is_compiling, is_host
from functavg.state import AverageState, Count, PyTree, Weight


@dataclass(eq=False, slots=True)
class Lerp:
    """The intention ``old + weight * (new - old)``; ``old`` may be an intention itself, committed before.

    A tree of torch tensors ``roundings`` takes the result in its own dtypes, in place.
    """

    old: PyTree | Lerp
    new: PyTree
    weight: Weight
    roundings: PyTree | None = None


@dataclass(eq=False, slots=True)
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


def run(plan: PyTree, *, inplace: bool = False) -> PyTree:
    """Check and commit a plan: return it with every intention replaced by its result.

    Args:
        plan: any tree with intentions among its leaves, most often an ``AverageState``.
        inplace: whether the memory of what is old may be reused, where it is mutable.

    Raises:
        TypeError, ValueError: an intention does not fit; nothing was written.
    """
    return check_plan(plan, inplace=inplace)()


def check_plan(plan: PyTree, *, inplace: bool = False) -> Callable[[], PyTree]:
    """Check a plan; return the function that commits it, as ``run`` does.

    Raises:
        TypeError, ValueError: an intention does not fit.
    """
    nodes, rebuild = _flatten_plan(plan)
    flattened: list[Any] = []
    jobs = {index: _Job(node, flattened, inplace) for index, node in enumerate(nodes) if isinstance(node, Intention)}
    batches = _batch([part for job in jobs.values() for part in job.parts])
    for batch in batches:
        batch[0].prepare(batch, inplace)

    def commit() -> PyTree:
        for batch in batches:
            batch[0].commit(batch, inplace)
        for index, job in jobs.items():
            nodes[index] = job.build_result()
        return rebuild(nodes)

    return commit


def _flatten_plan(plan: PyTree) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """Return the nodes of a plan, intentions among them, and the function that puts a plan of them together."""
    if type(plan) is Lerp:
        return [plan], operator.itemgetter(0)
    is_plain = type(plan) is AverageState and type(plan.memory) is tuple and len(plan.memory) == 0
    if is_plain and type(plan.average) is Lerp:  # of most rules
        return [plan.average], lambda nodes: AverageState(plan.count, nodes[0], ())
    nodes, spec = trees.flatten(plan)
    return nodes, spec.unflatten


class _Job:
    """One intention with its trees flattened, paired by path and divided into parts of one kernel."""

    def __init__(self, intention: Lerp | Apply, flattened: list[Any], inplace: bool) -> None:
        steps, self.tree = _unchain(intention)
        self.apply = intention if isinstance(intention, Apply) else None
        self.olds, self.spec = _flatten(self.tree, flattened)
        self.steps = [(self._align(new, flattened), weight) for new, weight in steps]
        roundings = intention.roundings if isinstance(intention, Lerp) else None
        self.roundings = None if roundings is None else self._align(roundings, flattened)
        self.parts = self._keep_whole(inplace) or self._divide(inplace)

    def _align(self, tree: PyTree, flattened: list[Any]) -> list[Any]:
        leaves, spec = _flatten(tree, flattened)
        return trees.align(self.spec, spec, leaves, self.olds)

    def name_of(self, index: int) -> str:
        """Return the path of a leaf."""
        return trees.paths(self.spec)[index]

    def build_result(self) -> PyTree:
        """Return the tree after all parts were committed; the old one itself where no leaf is a new object."""
        leaves: Sequence[Any] = self.olds
        parts, self.parts = self.parts, []  # parts know their job: without this, arrays would wait for the collector
        for part in parts:
            if part.indices is None:
                leaves = part.results
                continue
            leaves = list(leaves)
            for aliases, leaf in zip(part.indices, part.results, strict=True):
                for index in aliases:
                    leaves[index] = leaf
        if leaves is self.olds or all(map(operator.is_, leaves, self.olds)):
            return self.tree
        return self.spec.unflatten(leaves)

    def _keep_whole(self, inplace: bool) -> list[_Part] | None:
        """Return one part with all leaves, where one kernel takes them all and no two lie over one memory."""
        names = set(map(kernels.kernel_name_of, set(map(type, self.olds))))
        if len(names) != 1 or None in names:
            return None
        kernel = kernels.load(names.pop())
        news = self.steps[-1][0] if inplace else ()
        if not kernel.are_disjoint(self.olds, news):
            return None
        return [_Part(self, kernel, None, self.olds, self.steps, self.roundings)]

    def _divide(self, inplace: bool) -> list[_Part]:
        """Return the parts, with each pair of the same two mutable arrays once.

        Raises:
            TypeError: the average holds something that is no array, or one that cannot be written to.
            ValueError: in place, where the average shares one array and the params do not, or where arrays overlap.
        """
        others = [leaves for leaves, _ in self.steps] + ([] if self.roundings is None else [self.roundings])
        mine, *theirs = map(identities, (self.olds, *others))
        aliases: dict[str, dict[Hashable, list[int]]] = {}
        holders: dict[Hashable, int] = {}
        for index, old in enumerate(self.olds):
            name = kernels.kernel_name(old)
            if name is None:
                holds = f"the average holds {type(old).__name__}, which is no array"
                raise TypeError(f"{self.name_of(index)}: {holds}{advise(old)}")
            first = holders.setdefault(mine[index], index)
            if inplace and any(keys[first] != keys[index] for keys in theirs):
                raise ValueError(
                    f"{self.name_of(first)} and {self.name_of(index)} share one array in the average, but not in the "
                    "params; a step in place would mix them. Tie them in the params, or part them in the average: an "
                    "update with inplace=False does, and so do a new `init` and a new AveragedModel"
                )
            pair = (mine[index], *(keys[index] for keys in theirs))
            aliases.setdefault(name, {}).setdefault(pair, []).append(index)
        parts = []
        for name, pairs in aliases.items():
            firsts = [indices[0] for indices in pairs.values()]
            olds = [self.olds[index] for index in firsts]
            steps = [([news[index] for index in firsts], weight) for news, weight in self.steps]
            roundings = None if self.roundings is None else [self.roundings[index] for index in firsts]
            part = _Part(self, kernels.load(name), list(pairs.values()), olds, steps, roundings)
            if inplace:
                part.kernel.check_writable(olds, steps[-1][0], part.name_of)
            parts.append(part)
        return parts


@dataclass(eq=False, slots=True)
class _Part:
    """Those distinct leaves of an intention that one kernel takes."""

    job: _Job
    kernel: Any
    indices: Sequence[Sequence[int]] | None  # in the job, for each leaf those of all its aliases; None: all leaves
    olds: list[Any]
    steps: list[tuple[list[Any], Weight]]
    roundings: list[Any] | None
    groups: list[Any] = field(default_factory=list)  # for each step
    results: Sequence[Any] = ()

    def name_of(self, index: int) -> str:
        """Return the path of a leaf."""
        return self.job.name_of(index if self.indices is None else self.indices[index][0])

    def prepare(self, batch: list[_Part], inplace: bool) -> None:
        """Check that this part, and those batched with it, can take all that is to go into them."""
        averages = [part.olds for part in batch]
        for step, (news, weight) in enumerate(self.steps):
            check_scalar(weight, self.olds[:1], "the weight")
            groups = self.kernel.prepare(averages, news, self.name_of, self.roundings)
            if self.job.apply is None:
                weights = [weight] if len(batch) == 1 else [part.steps[step][1] for part in batch]
                self.kernel.try_steps(groups, weights, inplace, self.name_of)
            self.groups.append(groups)

    def commit(self, batch: list[_Part], inplace: bool) -> None:
        """Commit this part, and those batched with it, which read the same new leaves."""
        if self.job.apply is not None:
            apply = self.job.apply
            self.results = self.kernel.apply(
                self.groups[0], apply.count, apply.fn, apply.grouped, inplace, self.name_of
            )
            return
        results = self.kernel.lerp(self.groups[0], [part.steps[0][1] for part in batch], inplace)
        for part, leaves in zip(batch, results, strict=True):
            part.results = leaves
        for (news, weight), groups in zip(self.steps[1:], self.groups[1:], strict=True):
            if not all(map(operator.is_, self.results, self.olds)):  # the step before made new leaves
                groups = self.kernel.prepare([list(self.results)], news, self.name_of, self.roundings)
            (self.results,) = self.kernel.lerp(groups, [weight], True)


def _flatten(tree: PyTree, flattened: list[Any]) -> tuple[list[Any], Any]:
    """Flatten a tree once, however many intentions name it."""
    if is_compiling():  # to the compiler of torch 2.10 dicts have no identity
        return trees.flatten(tree)
    for known, leaves, spec in flattened:
        if known is tree:
            return leaves, spec
    leaves, spec = trees.flatten_flat(tree) if _is_flat(tree) else trees.flatten(tree)
    flattened.append((tree, leaves, spec))
    return leaves, spec


def _is_flat(tree: PyTree) -> bool:
    """Tell whether a tree is a dict of nothing but arrays, whose order then need not be sorted."""
    return type(tree) is dict and set(map(kernels.kernel_name_of, set(map(type, tree.values())))) <= _LEAVES


def _unchain(intention: Lerp | Apply) -> tuple[list[tuple[PyTree, Weight]], PyTree]:
    """Return the steps of nested intentions in the order in which they are taken, and what they start from.

    Steps of a host weight of 0 are left out, so that the first step in a chain makes new arrays.
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


def _batch(parts: list[_Part]) -> list[list[_Part]]:
    """Group parts that step towards the same new leaves, so that those are read and converted once."""
    if len(parts) == 1:
        return [parts]
    batches: dict[Hashable, list[_Part]] = {}
    for part in parts:
        alone = part.job.apply is not None or len(part.steps) != 1 or part.roundings is not None
        key: Hashable = id(part) if alone else (part.kernel.__name__, *objects(part.steps[0][0]))
        batches.setdefault(key, []).append(part)
    return list(batches.values())


def check_scalar(value: Any, leaves: Sequence[Any], name: str) -> None:
    """Raise a TypeError where leaves cannot be computed with a number or 0-d array; ``name`` says which it is."""
    if is_host(value) or is_compiling():
        return
    for kind, leaf in dict(zip(map(type, leaves), leaves, strict=True)).items():
        if kernels.kernel_name_of(kind) is None or kernels.takes_scalar(leaf, value):
            continue
        got = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        if getattr(value, "is_meta", False):
            got += " on the meta device, where it has no value"
        raise TypeError(
            f"{name} must be a plain number, or a 0-d array that leaves of {kind.__module__.partition('.')[0]}."
            f"{kind.__name__} can be computed with, got {got}. Read it into a plain number (int, float), or move it"
        )


def copy_leaves(params: PyTree, *, dtype: Any = None, device: Any = None) -> PyTree:
    """Return a tree of new arrays to start an average from; mutable arrays that are aliased stay so.

    Raises:
        TypeError: a leaf cannot be averaged; the message names it.
    """
    held = dtypes.check_dtype(dtype)
    leaves, spec = trees.flatten(params)
    for index, leaf in enumerate(leaves):
        name = kernels.kernel_name(leaf)
        reason = "it is no array" if name is None else kernels.load(name).refusal(leaf)
        if reason is not None:
            raise TypeError(_refuse(trees.paths(spec)[index], leaf, reason))
    made: dict[Hashable, Any] = {}
    keys = identities(leaves)
    for key, leaf in zip(keys, leaves, strict=True):
        if key not in made:
            made[key] = kernels.load(kernels.kernel_name(leaf)).copy(leaf, held, device)
    return spec.unflatten([made[key] for key in keys])


def _refuse(path: str, leaf: Any, reason: str) -> str:
    advice = advise(leaf) or "; leave it out of the params"
    return f"{path}: cannot average {type(leaf).__name__}: {reason}. Expected a dense array of numbers{advice}"


def identities(leaves: Sequence[Any]) -> list[Hashable]:
    """Return what is equal for leaves that are one mutable array in memory, and differs for all others."""
    keys: list[Hashable] = [(index,) for index in range(len(leaves))]
    names = list(map(kernels.kernel_name, leaves))
    for name in dict.fromkeys(names):
        if name is not None:
            indices = [index for index, other in enumerate(names) if other == name]
            found = kernels.load(name).identities([leaves[index] for index in indices])
            for index, key in zip(indices, found, strict=False):
                keys[index] = (name, key)
    return keys
