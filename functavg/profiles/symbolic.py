"""Symbolic runs of rules: the intentions of plans become linear combinations, and no array is computed with."""

from __future__ import annotations

__all__: list[str] = []

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg import trees
from functavg.checks import check_weight
from functavg.plan import Apply, Intention, Lerp
from functavg.progress import Progress, track
from functavg.rules.base import AveragingRule
from functavg.rules.lawa import LAWA
from functavg.state import AverageState, PyTree

AS_WEIGHT_RULE = """\
a function of averages (AvgFn) has no profile: its weights are not known. Write it as a WeightRule; \
for `lambda average, new, count: average + (new - average) / (count + 1)` this is

    @dataclass(frozen=True)
    class Mean(functavg.WeightRule):
        def weight(self, count, steps):
            return steps / (count + steps)"""


def read(rule: AveragingRule, gaps: Sequence[int], at: Iterable[int], progress: Progress = False) -> Iterator[PyTree]:
    """Yield the tree of weights after each number of updates in ``at``, which never decreases, of one run of a rule.

    Raises:
        TypeError: the plan applies a function.
        ValueError: the plan computes with arrays itself.
    """
    if type(rule) is LAWA:  # only the newest updates decide what the average is
        for updates in at:
            run = Run(rule, max(0, updates - rule.window))
            run.extend(gaps[run.updates : updates], progress)
            yield run.weights({})
        return
    run = Run(rule)
    known: dict[Node, NDArray[np.float64]] = {}
    for updates in at:
        run.extend(gaps[run.updates : updates], progress)
        yield run.weights(known)


# ---- forwards: plans become nodes


@dataclass(eq=False, slots=True)
class Node:
    """The linear combination ``keep * old + take * new``, or something given: the initial model, an iterate."""

    order: int
    _: KW_ONLY
    old: Node | None = None
    keep: float = 1.0
    new: Node | None = None
    take: float = 1.0
    index: int = -1


ONE = np.ones(())


class _Symbol(np.ndarray[Any, Any]):
    """An array that rules can pass around and look at, which stands for a node."""

    node: Node | None = None


class Run:
    """A run of a rule in which intentions become nodes instead of being carried out."""

    def __init__(self, rule: AveragingRule, updates: int = 0) -> None:
        self.rule = rule
        self.updates: int = updates
        self.orders: Iterator[int] = itertools.count()
        start = Node(next(self.orders), index=0)
        # What a state starts with are multiples of the initial model, most often that model itself.
        self.state: AverageState[PyTree] = trees.tree_map(
            lambda leaf: (
                _make_symbol(Node(next(self.orders), old=start, keep=float(leaf)), leaf)
                if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
                else leaf
            ),
            self.rule.init(ONE),
        )

    def extend(self, gaps: Sequence[int], progress: Progress = False) -> None:
        """Go on for as many updates as there are gaps."""
        for steps in track(gaps, progress, description="plans"):
            self.updates += 1
            params = _make_symbol(Node(next(self.orders), index=self.updates))
            before = self.state
            planned = self.rule.plan(params, before, steps)
            memory = before.memory if planned.memory is before.memory else self.settle(planned.memory)
            self.state = AverageState(planned.count, self.settle(planned.average), memory)

    def weights(self, known: dict[Node, NDArray[np.float64]]) -> PyTree:
        """Return the weights in each array of the average, that of the initial model first; ``known`` is added to."""

        def read_leaf(leaf: Any) -> NDArray[np.float64]:
            node = node_of(leaf)
            known[node] = vector = unroll(node, 1 + self.updates, known)
            return vector

        return trees.tree_map(read_leaf, self.state.average)

    def settle(self, planned: PyTree) -> PyTree:
        """Return a tree with what carrying out its intentions would give in their place."""
        if isinstance(planned, Intention):
            return self.evaluate(planned)
        leaves, spec = trees.flatten(planned)
        return trees.unflatten(spec, [self.evaluate(leaf) for leaf in leaves])

    def evaluate(self, planned: PyTree) -> PyTree:
        """Return the tree that carrying out an intention would give; anything else as it is."""
        steps = []
        while isinstance(planned, Lerp):
            weight = float(check_weight(planned.weight))
            if weight == 1:
                planned = planned.new
            else:
                if weight != 0:
                    steps.append((1 - weight, weight, planned.new))
                planned = planned.old
        if isinstance(planned, Apply):
            raise TypeError(AS_WEIGHT_RULE)
        for keep, take, new in reversed(steps):
            planned = self.combine(planned, new, keep=keep, take=take)
        return planned

    def combine(self, old: PyTree, new: PyTree, *, keep: float, take: float) -> PyTree:
        """Return the tree of ``keep * old + take * new``."""
        if isinstance(old, _Symbol) and isinstance(new, _Symbol):
            return _make_symbol(Node(next(self.orders), old=node_of(old), keep=keep, new=node_of(new), take=take))
        leaves, spec = trees.flatten(old)
        others, other_spec = trees.flatten(new)
        nodes = [
            Node(next(self.orders), old=node_of(leaf), keep=keep, new=node_of(other), take=take)
            for leaf, other in zip(leaves, trees.align(spec, other_spec, others), strict=True)
        ]
        return trees.unflatten(spec, list(map(_make_symbol, nodes)))


def _make_symbol(node: Node, array: NDArray[Any] = ONE) -> _Symbol:
    symbol = array.view(_Symbol)
    symbol.node = node
    return symbol


def node_of(leaf: Any) -> Node:
    """Return what an array stands for.

    Raises:
        ValueError: it stands for nothing, as it was computed.
    """
    node = getattr(leaf, "node", None)
    if not isinstance(node, Node):
        raise ValueError(
            "the rule's plan computes with arrays itself, so it has no symbolic profile: "
            f"expected a leaf of the params or of the state, or an intention, got {leaf!r}"
        )
    return node


# ---- backwards: from the average to what it is made of


def unroll(root: Node, size: int, known: dict[Node, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the weight in ``root`` of each iterate: each node passes its share on to its terms, the youngest first.

    ``known`` holds the weights in older nodes, so that many averages along one run cost little more than one.
    """
    vector = np.zeros(size)
    left = {root: 1.0}
    queue = [(-root.order, root)]
    while queue:
        _, node = heapq.heappop(queue)
        share = left.pop(node)
        if node in known:
            vector[: len(known[node])] += share * known[node]
            continue
        if node.index >= 0:
            vector[node.index] += share
        for term, coefficient in ((node.old, node.keep), (node.new, node.take)):
            if term is not None:
                if term not in left:
                    left[term] = 0.0
                    heapq.heappush(queue, (-term.order, term))
                left[term] += share * coefficient
    return vector
