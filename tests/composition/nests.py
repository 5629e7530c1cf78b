"""Random nests of rules, and their averages from the definitions, sharing no code with the library.

A nest is plain data: the name of a row of ``tests.tables.RULES``, or a tuple

* ``("every", interval, start, nest)``, ``("skip", nest)``,
* ``("several", {name: nest})``, ``("partition", {label: nest}, {leaf: label})``.

The oracle does not run along: each combinator *selects* from the list of all updates, and a rule then is one weighted
sum (see ``tests.oracle``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import functavg
from tests import oracle
from tests.tables import ALIKE, RULES

Update = tuple[int, Mapping[str, np.ndarray]]
"""The steps since the last update, and the params."""

SHAPES = {"a": (2,), "b": (), "c": (2, 3)}

# Every rule and combinator that takes a count on a device.
ON_DEVICE: dict[str, Any] = {name: name for name in RULES if name not in ALIKE} | {
    "Every": ("every", 2, 0, "EMA"),
    "Every-late": ("every", 2, 3, "SWA"),
    "Every-LAWA": ("every", 2, 0, "LAWA"),
    "SkipNonFinite": ("skip", "PowerEMA"),
    "Several": ("several", {"fast": "EMA-debias", "slow": "SWA"}),
    "Several-one": ("several", {"only": "EMA-callable"}),
    "Partition": ("partition", {"x": "EMA", "y": "LAWA", "unused": "SWA"}, {"a": "x", "b": "y", "c": "x"}),
    "deep": ("every", 2, 0, ("skip", ("several", {"p": "EMA", "q": ("every", 3, 0, "SWA")}))),
}


def rule_of(nest: Any) -> functavg.AveragingRule:
    """Return the rule that a nest describes."""
    match nest:
        case ("every", interval, start, inner):
            return functavg.Every(rule_of(inner), interval, start=start)
        case ("skip", inner):
            return functavg.SkipNonFinite(rule_of(inner))
        case ("several", inner):
            return functavg.Several({name: rule_of(it) for name, it in inner.items()})
        case ("partition", inner, labels):
            return functavg.Partition({label: rule_of(it) for label, it in inner.items()}, labels)
    return RULES[nest].rule


def average(nest: Any, first: Mapping[str, np.ndarray], updates: Sequence[Update]) -> Any:
    """Return the average after all updates."""
    match nest:
        case ("every", interval, start, inner):
            return average(inner, first, every(interval, start, updates))
        case ("skip", inner):
            return average(inner, first, finite(updates))
        case ("several", inner):
            return {name: average(it, first, updates) for name, it in inner.items()}
        case ("partition", inner, labels):
            parts = [
                average(it, restricted(first, mine), [(steps, restricted(params, mine)) for steps, params in updates])
                for label, it in inner.items()
                if (mine := [leaf for leaf in first if labels[leaf] == label])
            ]
            return {leaf: value for part in parts for leaf, value in part.items()}
    weights = RULES[nest].profile([steps for steps, _ in updates]) if updates else np.ones(1)
    iterates = [first, *(params for _, params in updates)]
    with np.errstate(invalid="ignore"):
        return {leaf: oracle.average(weights, [params[leaf] for params in iterates]) for leaf in first}


def count(nest: Any, leaves: Sequence[str], updates: Sequence[Update]) -> int:
    """Return the count after all updates."""
    match nest:
        case ("every", interval, start, inner):
            return count(inner, leaves, every(interval, start, updates))
        case ("skip", inner):
            return count(inner, leaves, finite(updates))
        case ("several", inner):
            return min(count(it, leaves, updates) for it in inner.values())
        case ("partition", inner, labels):
            parts = {label: [leaf for leaf in leaves if labels[leaf] == label] for label in inner}
            return min(
                count(inner[label], mine, [(steps, restricted(params, mine)) for steps, params in updates])
                for label, mine in parts.items()
                if mine
            )
    return RULES[nest].count([steps for steps, _ in updates])


def every(interval: int, start: int, updates: Sequence[Update]) -> list[Update]:
    """Return the updates that get through, each with the steps since the one before it, the first since ``start``."""
    through, last = [], start
    times = np.cumsum([steps for steps, _ in updates])
    for time, (_, params) in zip(times, updates, strict=True):
        if time - last >= interval:
            through.append((int(time - last), params))
            last = time
    return through


def finite(updates: Sequence[Update]) -> list[Update]:
    """Return the updates without a NaN or an infinity."""
    return [(steps, params) for steps, params in updates if all(np.isfinite(leaf).all() for leaf in params.values())]


def restricted(params: Mapping[str, np.ndarray], leaves: Sequence[str]) -> dict[str, np.ndarray]:
    """Return some of the leaves."""
    return {leaf: params[leaf] for leaf in leaves}


# ---- strategies


@st.composite
def nests(draw: st.DrawFn, rows: Sequence[str], depth: int = 4, several: bool = True) -> Any:
    """Draw a nest of at most this depth."""
    kinds = ["rule"] if depth == 0 else ["rule", "every", "skip", "partition"] + ["several"] * several
    inner = nests(rows, depth - 1, several)
    match draw(st.sampled_from(kinds)):
        case "every":
            return "every", draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(inner)
        case "skip":
            return "skip", draw(inner)
        case "several":
            return "several", draw(st.dictionaries(st.sampled_from("pq"), inner, min_size=1, max_size=2))
        case "partition":
            rules = draw(st.dictionaries(st.sampled_from("xy"), nests(rows, depth - 1, False), min_size=1, max_size=2))
            return "partition", rules, {leaf: draw(st.sampled_from(sorted(rules))) for leaf in SHAPES}
    return draw(st.sampled_from(rows))


@st.composite
def streams(draw: st.DrawFn, min_size: int = 0, max_size: int = 10) -> list[Update]:
    """Draw updates of uneven steps, one of them perhaps with a NaN or an infinity in one leaf."""
    steps = draw(st.lists(st.integers(1, 5), min_size=min_size, max_size=max_size))
    updates = [(gap, iterate(index + 1)) for index, gap in enumerate(steps)]
    if updates and draw(st.booleans()):
        _, params = updates[draw(st.integers(0, len(updates) - 1))]
        leaf = draw(st.sampled_from(sorted(SHAPES)))
        params[leaf] = params[leaf] * draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return updates


def iterate(seed: int) -> dict[str, np.ndarray]:
    """Return params of random values, none of them 0."""
    generator = np.random.default_rng(seed)
    return {leaf: np.asarray(generator.uniform(0.5, 1.5, shape)) for leaf, shape in SHAPES.items()}
