"""Runs of rules over arrays that stand for what they would hold: the intentions of plans become linear combinations."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from functavg import trees
from functavg.plan import Apply, Intention, Lerp
from functavg.profiles.linearity import Linear
from functavg.rules.base import AveragingRule
from functavg.scalars import check_weight
from functavg.state import AverageState, PyTree

# ---- forwards: plans become nodes


class Node:
    """The linear combination ``keep * old + take * new``, or something given: the initial model, an iterate."""

    __slots__ = ("keep", "new", "old", "order", "place", "take")

    def __init__(
        self,
        order: int,
        old: Node | None = None,
        keep: float = 1.0,
        new: Node | None = None,
        take: float = 1.0,
        place: int = -1,
    ) -> None:
        self.order = order
        self.old = old
        self.keep = keep
        self.new = new
        self.take = take
        self.place = place


ONE = np.ones(())


class _Traced(np.ndarray[Any, Any]):
    """An array that rules can pass around and look at, which stands for a node."""

    node: Node | None = None


class Run:
    """A run of a rule in which intentions become nodes instead of being carried out."""

    def __init__(self, rule: AveragingRule, updates: int = 0) -> None:
        self.rule = rule
        self.updates = updates
        self.linear = Linear()
        self.orders = itertools.count()
        start = Node(next(self.orders), place=0)
        # What a state starts with are multiples of the initial model, most often that model itself.
        self.state = trees.tree_map(
            lambda leaf: (
                _traced(Node(next(self.orders), start, float(leaf)), leaf)
                if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
                else leaf
            ),
            self.rule.init(ONE),
        )

    def update(self, steps: int) -> None:
        self.updates += 1
        params = _traced(Node(next(self.orders), place=self.updates))
        before = self.state
        planned = self.rule.plan(params, before, steps)
        memory = before.memory if planned.memory is before.memory else self.settled(planned.memory)
        self.state = AverageState(planned.count, self.settled(planned.average), memory)

    def settled(self, planned: PyTree) -> PyTree:
        """Return a tree with what carrying out its intentions would give in their place."""
        if isinstance(planned, Intention):
            return self.result(planned)
        leaves, spec = trees.flatten(planned)
        return trees.unflatten(spec, [self.result(leaf) for leaf in leaves])

    def result(self, planned: PyTree) -> PyTree:
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
            planned = self.combined(planned.old, planned.new, *self.linear.coefficients(planned))
        for keep, take, new in reversed(steps):
            planned = self.combined(planned, new, keep, take)
        return planned

    def combined(self, old: PyTree, new: PyTree, keep: float, take: float) -> PyTree:
        if isinstance(old, _Traced) and isinstance(new, _Traced):
            return _traced(Node(next(self.orders), node_of(old), keep, node_of(new), take))
        leaves, spec = trees.flatten(old)
        others, other_spec = trees.flatten(new)
        nodes = [
            Node(next(self.orders), node_of(leaf), keep, node_of(other), take)
            for leaf, other in zip(leaves, trees.align(spec, other_spec, others), strict=True)
        ]
        return trees.unflatten(spec, list(map(_traced, nodes)))


def _traced(node: Node, array: NDArray[Any] = ONE) -> _Traced:
    traced = array.view(_Traced)
    traced.node = node
    return traced


def node_of(leaf: Any) -> Node:
    """Return what an array stands for.

    Raises:
        ValueError: it stands for nothing, as it was computed.
    """
    node = getattr(leaf, "node", None)
    if not isinstance(node, Node):
        raise ValueError(
            "the rule's plan computes with arrays itself, so no profile can be read off it: "
            f"expected a leaf of the params or of the state, or an intention, got {leaf!r}"
        )
    return node


# ---- backwards: from the average to what it is made of


def shares(root: Node, size: int, known: dict[Node, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the weight in ``root`` of each place: each node passes its share on to its terms, the youngest first.

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
        if node.place >= 0:
            vector[node.place] += share
        for term, coefficient in ((node.old, node.keep), (node.new, node.take)):
            if term is not None:
                if term not in left:
                    left[term] = 0.0
                    heapq.heappush(queue, (-term.order, term))
                left[term] += share * coefficient
    return vector
