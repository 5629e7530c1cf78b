"""Target networks: modules that take single steps towards a model, without a count."""

from __future__ import annotations

__all__ = ["soft_update"]

import operator
from collections.abc import Sequence
from typing import Literal, get_args

from torch.nn import Module, ModuleList

from functavg.checks import check_fraction
from functavg.nn import pairing
from functavg.nn.buffers import check_copies, split_buffers
from functavg.nn.modes import unmerged
from functavg.nn.writing import drop_derived_values
from functavg.plan import Lerp, check_plan
from functavg.state import Weight
from functavg.trees import NamedList

Modules = Module | Sequence[Module]

Buffers = Literal["copy", "average", "keep"]


def soft_update(target: Modules, model: Modules, tau: Weight, *, buffers: Buffers = "copy") -> None:
    """Move a target network one step towards a model, in place: ``target + tau (model - target)``.

    Parameters are paired by name, whatever wraps either module, and tied ones move once. Nothing is remembered from one
    call to the next. It costs a walk over both modules and one grouped ``lerp_``.

    Each parameter stays in its dtype and is rounded to it after every step. In bfloat16, with its 8 bits, a target
    stops up to ``target / (256 tau)`` away from the model: with a ``tau`` of 0.005 it hardly moves at all. Hold the
    target of a bfloat16 model in float32, as ``copy.deepcopy(model).float()``; or let
    ``AveragedModel(model, rule=EMA(1 - tau, start="init"))`` keep float32 values beside a module in bfloat16.

    Args:
        target: the module that follows, or a list of modules, such as two critics; all of them move, or none.
        model: the module that is trained, or as long a list.
        tau: the step, in [0, 1]: exactly 1 copies, exactly 0 leaves the parameters as they are. A number, or a 0-d
            tensor, whose value is not looked at.
        buffers: what becomes of the buffers, such as the running statistics of BatchNorm. ``"copy"``: the target takes
            those of the model. ``"average"``: real and complex ones that are persistent move as parameters do, others
            are copied. (A step from an infinity, as in a mask, to itself is NaN: copy such buffers.) ``"keep"``: the
            target keeps its own. Default: ``"copy"``.

    Raises:
        TypeError: an argument is of another kind, or a parameter cannot be averaged.
        ValueError: ``tau`` or ``buffers`` is out of range, the target is the model, or the two do not have the same
            parameters, by name and shape; the message names them. Nothing was changed then.

    Example:
        >>> import copy, functavg, torch
        >>> critic = torch.nn.Linear(1, 1, bias=False)
        >>> target = copy.deepcopy(critic).requires_grad_(False)
        >>> with torch.no_grad():
        ...     _ = target.weight.fill_(0.0), critic.weight.fill_(1.0)
        >>> functavg.soft_update(target, critic, 0.25)
        >>> target.weight.item()
        0.25

    Source: Lillicrap et al., Continuous control with deep reinforcement learning (DDPG), 2015.
    """
    weight = check_fraction(tau, "tau")
    if buffers not in get_args(Buffers):
        raise ValueError(f"buffers must be one of {', '.join(map(repr, get_args(Buffers)))}, got {buffers!r}")
    target, model = _join(target, model)
    pairs = _pair(target, model)
    if not pairs.may_be_merged:
        _step_(target, pairs, weight, buffers)
        return
    with unmerged(target, model):
        _step_(target, _pair(target, model), weight, buffers)


def _pair(target: Module, model: Module) -> pairing.Pairs:
    pairs = pairing.pair(target, model, called="target", advice="Make the target as a copy.deepcopy of the model")
    if pairs.averages and all(map(operator.is_, pairs.averages, pairs.news)):
        raise ValueError("the target is the model, or holds its parameters; make it a copy.deepcopy of the model")
    return pairs


def _step_(target: Module, pairs: pairing.Pairs, weight: Weight, buffers: Buffers) -> None:
    """Move what was paired, all of it or nothing."""
    copies = None if buffers == "keep" else split_buffers(pairs, buffers == "average")
    averages, news = NamedList(pairs.averages, pairs.names), NamedList(pairs.news, pairs.names)
    commit = check_plan(Lerp(averages, news, weight), inplace=True)
    commit_buffers = check_copies(copies, target)
    commit()
    commit_buffers()
    drop_derived_values()


def _join(target: Modules, model: Modules) -> tuple[Module, Module]:
    """Return both as single modules."""
    targets, models = _as_list(target, "target"), _as_list(model, "model")
    if isinstance(target, Module) != isinstance(model, Module) or len(targets) != len(models):
        raise ValueError(
            f"expected two modules, or two lists of as many, got {_describe(target)} as target and {_describe(model)} "
            "as model"
        )
    if len(targets) == 1:
        return targets[0], models[0]
    return ModuleList(targets), ModuleList(models)


def _as_list(modules: object, name: str) -> list[Module]:
    if isinstance(modules, Module):
        return [modules]
    if isinstance(modules, Sequence) and all(isinstance(module, Module) for module in modules):
        return list(modules)
    raise TypeError(f"{name} must be a torch.nn.Module or a list of them, got {_describe(modules)}")


def _describe(modules: object) -> str:
    kinds = f" of {len(modules)}" if isinstance(modules, Sequence) and not isinstance(modules, str) else ""
    return type(modules).__name__ + kinds
