"""Plans: what an update intends, checked as a whole and then committed.

A rule touches no array. It returns the next state, in which what changes is an intention over whole trees.
``run`` checks every intention before the first write, then hands the leaves to the kernels.
"""

from __future__ import annotations

__all__: list[str] = []

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
    """The intention ``old + weight * (new - old)``; ``old`` may be an intention itself, which is committed first.

    ``roundings``, a tree of torch tensors, takes the result in place, in its own dtypes.
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


Intention: tuple[type[Lerp], type[Apply]] = (Lerp, Apply)

_LEAVES = {"torch", "numpy"}
"""Kernels whose arrays are never containers; those of the Array API may be."""


def run(plan: PyTree, *, inplace: bool = False) -> PyTree:
    """Check and commit a plan: return it with every intention replaced by its result.

    Args:
        plan: any tree with intentions among its leaves, most often an ``AverageState``.
        inplace: whether old arrays may be written to, if they are mutable.

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
    flattened: list[Any] | None = None if is_compiling() else []  # to the compiler of torch 2.10 dicts have no identity
    jobs = {index: _make_job(node, flattened) for index, node in enumerate(nodes) if isinstance(node, Intention)}
    batches = []
    for batch in _batch(list(jobs.values())):
        if _prepare(batch, inplace, apart=False):
            batches.append(batch)
        else:
            parts = _batch([part for job in batch for part in job.divide(inplace)])
            for part in parts:
                _prepare(part, inplace, apart=True)
            batches += parts

    def commit() -> PyTree:
        for batch in batches:
            _commit(batch, inplace)
        for index, job in jobs.items():
            nodes[index] = job.build_result()
        return rebuild(nodes)

    return commit


def _flatten_plan(plan: PyTree) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """Return the nodes of a plan, intentions among them, and the function that rebuilds the plan from nodes."""
    if type(plan) is Lerp:
        return [plan], operator.itemgetter(0)
    is_plain = type(plan) is AverageState and type(plan.memory) is tuple and len(plan.memory) == 0
    if is_plain and type(plan.average) is Lerp:  # of most rules
        return [plan.average], lambda nodes: AverageState(plan.count, nodes[0], ())
    nodes, spec = trees.flatten(plan)
    return nodes, spec.unflatten


@dataclass(eq=False, slots=True)
class _Job:
    """The leaves of an intention, paired by path: all of them, or the distinct ones that one kernel takes."""

    tree: PyTree
    spec: Any
    apply: Apply | None
    kernel: Any  # None: the leaves need several
    olds: list[Any]
    steps: list[tuple[list[Any], Weight]]
    roundings: list[Any] | None
    whole: _Job | None = None  # that this one is a part of
    indices: Sequence[Sequence[int]] = ()  # for each leaf those of all its aliases in the whole
    groups: Sequence[Any] = ()  # for each step
    results: Sequence[Any] = ()

    def name_of(self, index: int) -> str:
        """Return the path of a leaf."""
        return trees.paths(self.spec)[index if self.whole is None else self.indices[index][0]]

    def keep_results(self, leaves: Sequence[Any]) -> None:
        """Keep the leaves after the last step; a part gives them to the whole, under each of their aliases."""
        if self.whole is None:
            self.results = leaves
            return
        results = self.whole.results = list(self.whole.results)
        for aliases, leaf in zip(self.indices, leaves, strict=True):
            for index in aliases:
                results[index] = leaf

    def build_result(self) -> PyTree:
        """Return the tree after all steps; the old one itself if no leaf is a new object."""
        # Leaf by leaf also where both are one list: torch before 2.11 does not compile `is` between lists.
        if all(map(operator.is_, self.results, self.olds)):
            return self.tree
        return self.spec.unflatten(self.results)

    def divide(self, inplace: bool) -> list[_Job]:
        """Return the parts of this job, one for each kernel, with aliased leaves once.

        Raises:
            TypeError: the average holds something that is not an array.
            ValueError: in place, where the average shares one array and the params do not.
        """
        self.results = self.olds
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
            indices = list(pairs.values())
            olds, *distinct = [[leaves[some[0]] for some in indices] for leaves in (self.olds, *others)]
            steps = [(news, weight) for news, (_, weight) in zip(distinct, self.steps, strict=False)]
            roundings = None if self.roundings is None else distinct[-1]
            part = _Job(self.tree, self.spec, self.apply, kernels.load(name), olds, steps, roundings, self, indices)
            parts.append(part)
        return parts


def _make_job(intention: Lerp | Apply, flattened: list[Any] | None) -> _Job:
    """Return the job of an intention with its trees flattened.

    Raises:
        ValueError: the trees do not have the same paths.
    """

    def align(tree: PyTree) -> list[Any]:
        leaves, other = _flatten(tree, flattened)
        return trees.align(spec, other, leaves, olds)

    steps, tree = _unchain(intention)
    olds, spec = _flatten(tree, flattened)
    names = set(map(kernels.kernel_name_of, set(map(type, olds))))
    kernel = kernels.load(names.pop()) if len(names) == 1 and None not in names else None
    apply, roundings = (intention, None) if isinstance(intention, Apply) else (None, intention.roundings)
    aligned = [(align(new), weight) for new, weight in steps]
    return _Job(tree, spec, apply, kernel, olds, aligned, None if roundings is None else align(roundings))


def _prepare(batch: list[_Job], inplace: bool, *, apart: bool) -> bool:
    """Check that the jobs of a batch can take their steps; return False if they have to be divided for that.

    Parts are ``apart``: their leaves are distinct arrays, which can be checked one by one.

    Raises:
        TypeError, ValueError: one cannot; the message names the leaf.
    """
    job = batch[0]
    if job.kernel is None:
        return False
    averages = [other.olds for other in batch]
    found = []
    for step, (news, _) in enumerate(job.steps):
        weights = None if job.apply is not None else [other.steps[step][1] for other in batch]
        for weight in weights or ():
            check_scalar(weight, job.olds[:1], "the weight")
        groups = job.kernel.prepare(averages, news, job.name_of, job.roundings, weights, inplace, apart)
        if groups is None:
            return False
        found.append(groups)
    job.groups = found
    return True


def _commit(batch: list[_Job], inplace: bool) -> None:
    """Take the steps of a batch."""
    job = batch[0]
    if job.apply is not None:
        apply = job.apply
        job.keep_results(job.kernel.apply(job.groups[0], apply.count, apply.fn, apply.grouped, inplace, job.name_of))
        return
    results = job.kernel.lerp(job.groups[0], [other.steps[0][1] for other in batch], inplace)
    for (news, weight), groups in zip(job.steps[1:], job.groups[1:], strict=True):
        if not all(map(operator.is_, results[0], job.olds)):  # the step before made new leaves
            groups = job.kernel.prepare(results, news, job.name_of, job.roundings)
        results = job.kernel.lerp(groups, [weight], True)
    for other, leaves in zip(batch, results, strict=True):
        other.keep_results(leaves)


def _flatten(tree: PyTree, flattened: list[Any] | None) -> tuple[list[Any], Any]:
    """Flatten a tree; one of those ``flattened`` before is not flattened again."""
    if flattened is None or type(tree) is trees.NamedList:
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

    Steps with a host weight of 0 are left out, so that the first step in a chain makes new arrays.
    """
    if isinstance(intention, Apply):
        return [(intention.new, 1)], intention.old
    steps: list[tuple[PyTree, Weight]] = []
    node: Any = intention
    while isinstance(node, Lerp):
        steps.append((node.new, check_weight(node.weight)))
        node = node.old
    if len(steps) > 1:
        steps = [step for step in reversed(steps) if not (is_host(step[1]) and step[1] == 0)] or steps[:1]
    return steps, node


def _batch(jobs: list[_Job]) -> list[list[_Job]]:
    """Group jobs that step towards the same new leaves, so that those are read and converted once."""
    if len(jobs) == 1:
        return [jobs]
    batches: dict[Hashable, list[_Job]] = {}
    for job in jobs:
        alone = job.kernel is None or job.apply is not None or len(job.steps) != 1 or job.roundings is not None
        key: Hashable = id(job) if alone else (job.kernel.__name__, *objects(job.steps[0][0]))
        batches.setdefault(key, []).append(job)
    return list(batches.values())


def check_scalar(value: Any, leaves: Sequence[Any], name: str) -> None:
    """Raise a TypeError unless leaves can be computed with a number or 0-d array, which messages call ``name``."""
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
    """Return a key for each leaf, equal only for leaves that are one mutable array in memory."""
    keys: list[Hashable] = [(index,) for index in range(len(leaves))]
    names = list(map(kernels.kernel_name, leaves))
    for name in dict.fromkeys(names):
        if name is not None:
            indices = [index for index, other in enumerate(names) if other == name]
            found = kernels.load(name).identities([leaves[index] for index in indices])
            for index, key in zip(indices, found, strict=False):
                keys[index] = (name, key)
    return keys
