"""The extra state of an average: what is not in its count and its module, as plain data."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functavg import trees
from functavg.kernels.torch.dtensor import distribute, is_sharded
from functavg.nn.held_state import HeldState
from functavg.rules.base import AveragingRule
from functavg.rules.saved import Saved, get_shape, load_leaves
from functavg.saving import to_state_dict
from functavg.state import AverageState


def make_extra_state(held: HeldState, rule: AveragingRule) -> dict[str, Any] | None:
    """Return the memory of a rule and all averages but the first, None if there is neither.

    Numbers and tensors have the names of ``functavg.to_state_dict``. ``rules`` tells which rule wrote each memory,
    ``module`` which average the module holds.
    """
    values = to_state_dict(AverageState(0, held.averages, held.memory))
    del values["count"]
    if not values:
        return None
    memories = {
        place: repr(inner)
        for place, inner in rule._name_memories().items()
        if any(name == place or name.startswith(f"{place}.") for name in values)
    }
    return {"rules": memories, "module": ".".join(("average", *held.keys)), **values}


def find_problem(held: HeldState, rule: AveragingRule, extra: dict[str, Any]) -> str | None:
    """Return why an extra state does not fit this rule and this model, None if it does."""
    own = make_extra_state(held, rule) or {}
    mine, theirs = _get_values(own), _get_values(extra)
    missing = [name for name in mine if name not in theirs]
    unexpected = [name for name in theirs if name not in mine]
    reshaped = [
        f"{name} of shape {get_shape(theirs[name])} for {get_shape(mine[name])}"
        for name in mine
        if name in theirs and get_shape(theirs[name]) != get_shape(mine[name])
    ]
    if not (missing or unexpected or reshaped) and _get_kinds(own) == _get_kinds(extra):
        return None
    writer = extra.get("rules", {}).get("memory", "a rule without memory, such as EMA, or another library")
    return (
        f"the memory of the average was written by {writer} and is read by {rule!r}: missing {trees.some(missing)}; "
        f"unexpected {trees.some(unexpected)}; reshaped {trees.some(reshaped)}"
    )


def load_extra_state(held: HeldState, rule: AveragingRule, extra: dict[str, Any]) -> None:
    """Take over an extra state that fits.

    Raises:
        TypeError, ValueError: it was sharded in another way; nothing was changed.
    """
    own = _get_values(make_extra_state(held, rule) or {})
    with torch.inference_mode(False):
        loaded = load_leaves(list(own), list(own.values()), _shard_like(_get_values(extra), own))
    _, spec = trees.flatten((held.averages, held.memory))
    held.averages, held.memory = trees.unflatten(spec, loaded)


def resume_from(
    held: HeldState, rule: AveragingRule, extra: dict[str, Any], count: int, values: dict[str, Tensor]
) -> AverageState[Any]:
    """Return the state that goes on from a saved average, and from what fits of its extra state.

    Args:
        held: the state to load into.
        rule: its rule.
        extra: the extra state of any rule and model.
        count: the saved count.
        values: the saved average, by name.
    """
    own = _get_values(make_extra_state(held, rule) or {})
    first = {f"{extra.get('module', 'average')}.{name}": value for name, value in values.items()}
    saved = _shard_like(_get_values(extra), own) | first
    with torch.inference_mode(False), torch.no_grad():
        return rule.resume(values, count, Saved(saved, extra.get("rules", {})))


def _get_values(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in ("rules", "module")}


def _get_kinds(extra: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the classes of the rules that wrote an extra state; their arguments do not change the format."""
    return extra.get("module"), {place: rule.partition("(")[0] for place, rule in extra.get("rules", {}).items()}


def _shard_like(values: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with whole tensors, as in a full state_dict, sharded like our own of the same name."""
    return {
        name: distribute(value, own[name])
        if isinstance(value, Tensor) and not is_sharded(value) and is_sharded(own.get(name))
        else value
        for name, value in values.items()
    }
