"""Several: averages side by side that read each parameter once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functavg
from functavg import EMA, LAWA, SWA, AvgFn, Every, Freeze, Latest, PowerEMA, Several, trees
from functavg.kernels import torch as torch_kernel
from tests.tables import mean_step

RULE = Several({"fast": EMA(0.5), "slow": EMA(0.75), "mean": SWA(), "newest": Latest()})


def params(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {str(index): torch.full((3,), value, dtype=dtype) for index in range(50)}


@pytest.mark.parametrize("inplace", [False, True])
def test_each_average_is_what_its_rule_gives_alone(inplace: bool) -> None:
    """Bit for bit, in the state of each name."""
    rule = Several({**RULE.rules, "window": LAWA(2), "fn": AvgFn(mean_step), "every": Every(SWA(), 2)})
    state = rule.init(params(0.0))
    alone = {name: one.init(params(0.0)) for name, one in rule.rules.items()}
    for value in (1.0, 3.0, 2.5):
        state = rule.update(params(value), state, inplace=inplace)
        alone = {name: one.update(params(value), alone[name]) for name, one in rule.rules.items()}
    for name, wanted in alone.items():
        assert all(torch.equal(state.average[name][leaf], wanted.average[leaf]) for leaf in wanted.average)
        assert state.memory[name].count == wanted.count
        assert state.memory[name].average == ()


def test_the_count_is_the_least() -> None:
    """Of a rule that waits, here."""
    rule = Several({"now": SWA(), "later": Every(SWA(), 3)})
    state = rule.init(np.zeros(1))
    counts = []
    for _ in range(4):
        state = rule.update(np.ones(1), state)
        counts.append((state.count, state.memory["now"].count))
    assert counts == [(0, 1), (0, 2), (3, 3), (3, 4)]


class Copies(TorchDispatchMode):
    """Counts the conversions of groups of leaves."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._foreach_copy_.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_are_read_grouped_and_converted_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rules there are, in whatever nest: one flattening, one grouping, one conversion for all."""
    rules = {"a": EMA(0.5), "b": SWA(), "c": Several({"d": PowerEMA(2), "e": Every(EMA(0.75), 1)})}
    rule = Several(rules)
    state = rule.init([params(0.0, dtype)])
    state = rule.update([params(1.0, dtype)], state)  # the first one copies
    new = [params(2.0, dtype)]
    grouped, flattened = [], []
    prepare, flatten = torch_kernel.prepare, trees.flatten
    monkeypatch.setattr(torch_kernel, "prepare", lambda *args: grouped.append(1) or prepare(*args))
    monkeypatch.setattr(trees, "flatten", lambda tree: flattened.append(tree is new) or flatten(tree))
    with Copies() as mode:
        rule.update(new, state, inplace=True)
    assert (len(grouped), sum(flattened)) == (1, 1)
    assert mode.count == (dtype == torch.bfloat16)


def test_an_error_changes_none_of_them() -> None:
    """One rule's plan fails, and no average of another was written."""
    rule = Several({"a": EMA(0.5), "b": functavg.WeightFn(lambda count, steps: float("nan"))})
    state = rule.init({"w": torch.zeros(2)})
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match="weight must be finite, got nan"):
        rule.update({"w": torch.ones(2)}, state, inplace=True)
    assert torch.equal(state.average["a"]["w"], before.average["a"]["w"])
    rule = Several({"a": EMA(0.5), "b": LAWA(2)})
    state = rule.init({"w": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"^tree\['w'\]: expected shape \(2,\), got \(3,\)"):
        rule.update({"w": torch.ones(3)}, state, inplace=True)
    with pytest.raises(ValueError, match=r"missing tree\['w'\]; unexpected tree\['v'\]"):
        rule.update({"v": torch.ones(2)}, state, inplace=True)


def test_a_place_and_a_dtype_hold_for_all() -> None:
    """``init`` passes them on."""
    state = RULE.init(params(0.0), dtype=torch.float64, device="cpu")
    assert {leaf.dtype for average in state.average.values() for leaf in average.values()} == {torch.float64}


def test_it_is_a_value_although_it_is_given_a_dict() -> None:
    """It prints as its call, compares, hashes, pickles, and what the caller does to the dict later is nothing to it."""
    rules: dict[str, Any] = {"a": EMA(0.5), "b": Freeze()}
    rule = Several(rules)
    assert repr(rule) == "Several(rules={'a': EMA(decay=0.5, debias=False, start='copy'), 'b': Freeze()})"
    rules["c"] = SWA()
    del rules["a"]
    assert list(rule.rules) == ["a", "b"]
    assert rule == Several({"b": Freeze(), "a": EMA(0.5)}) != Several({"a": EMA(0.5)})
    assert hash(rule) == hash(Several({"b": Freeze(), "a": EMA(0.5)}))
    assert rule == eval(repr(rule)) == pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule)
    assert rule.rules["a"] == EMA(0.5)
    assert Several(rule.rules) == rule
    with pytest.raises(TypeError, match="does not support item assignment"):
        rule.rules["a"] = SWA()  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Several({}), ValueError, r"rules must have at least one rule, got \{\}"),
        (lambda: Several([EMA()]), TypeError, r"rules must be a dict of rules, got \[EMA\(.*\)\] of list"),
        (lambda: Several(EMA()), TypeError, r"rules must be a dict of rules, got EMA\(.*\) of EMA"),
        (
            lambda: Several({"a": 0.9}),
            TypeError,
            r"rules\['a'\] must be an AveragingRule such as EMA\(0\.999\), got 0\.9",
        ),
        (lambda: Several({"a": EMA}), TypeError, r"rules\['a'\] must be .*; pass an instance: EMA\(\.\.\.\)"),
        (lambda: Several({1: EMA()}), TypeError, "rules must be named by strings, got 1 of int"),
    ],
)
def test_a_bad_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    """T6: by name and value."""
    with pytest.raises(error, match="^" + message):
        make()


def test_the_state_of_other_rules_is_refused() -> None:
    """The error says which it has, and which it should have."""
    rule = Several({"a": EMA(), "b": EMA()})
    with pytest.raises(
        ValueError, match=r"^the state was not made by Several: expected a memory of \['a', 'b'\], got tuple"
    ):
        rule.update(np.ones(1), EMA().init(np.ones(1)))
    with pytest.raises(ValueError, match=r"expected a memory of \['a', 'b'\], got \['a', 'c'\]"):
        rule.update(np.ones(1), Several({"a": EMA(), "c": EMA()}).init(np.ones(1)))
