"""States as flat dicts of numbers and arrays, for files and checkpointers that know nothing else."""

from __future__ import annotations

__all__ = ["from_state_dict", "to_state_dict"]

from collections.abc import Mapping
from typing import Any

from functavg import kernels, trees
from functavg.advice import advise, is_tensordict
from functavg.checks import check_state
from functavg.rules.saved import load_leaves
from functavg.state import AverageState, T


def to_state_dict(state: AverageState[Any], /) -> dict[str, Any]:
    """Return a state as a flat dict of its numbers and arrays by name, without copying any.

    Names are the keys that lead to a leaf, joined by dots: ``count``, ``average.encoder.weight``, ``memory.0``. So a
    state of any rule goes into whatever stores named tensors: ``torch.save`` (``torch.load`` with ``weights_only=True``
    reads it), ``torch.distributed.checkpoint`` (DTensors too), ``numpy.savez``.

    Args:
        state: the state of any rule, with leaves of any array library.

    Returns:
        The dict. Its arrays are those of the state, and change with it where it is updated in place.

    Raises:
        TypeError: ``state`` is not an AverageState, or a leaf is neither a number nor an array.
        ValueError: two leaves would have one name, as those at ``['a.b']`` and at ``['a']['b']``.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.to_state_dict(functavg.SWA().init({"layer": {"w": np.zeros(2)}}))
        {'count': 0, 'average.layer.w': array([0., 0.])}
    """
    check_state(state, "to_state_dict(state)")
    leaves, spec = trees.flatten(state)
    for index, leaf in enumerate(leaves):
        if kernels.kernel_name(leaf) is None:
            raise TypeError(f"{_path(spec, index)}: expected a number or an array, got {type(leaf).__name__}")
    return dict(zip(_name_leaves(spec), leaves, strict=True))


def from_state_dict(like: AverageState[T], saved: Mapping[str, Any], /) -> AverageState[T]:
    """Return the state that ``to_state_dict`` made a dict of, in the form of another one.

    Args:
        like: a state of the structure and shapes to load, as ``rule.init(params)`` makes it. Each leaf is brought into
            the dtype, the device and the shards that it has here; a leaf on torch's meta device stays on that of its
            value. Leaves that are one array here stay one, and take the value of the first of them.
        saved: what ``to_state_dict`` returned. A number may have become a 0-d array on its way, and an array of JAX one
            of numpy.

    Returns:
        The loaded state; it shares no memory with ``like`` and ``saved``.

    Raises:
        TypeError: ``like`` is not an AverageState or ``saved`` not a dict, or a value is of another type than its leaf.
        ValueError: names are missing or unexpected, or a value has another shape or other shards.

    Example:
        >>> import functavg, numpy as np
        >>> rule, params = functavg.EMA(0.9), {"w": np.ones(2)}
        >>> saved = functavg.to_state_dict(rule.update(params, rule.init(params)))
        >>> functavg.from_state_dict(rule.init({"w": np.zeros(2)}), saved)
        AverageState(count=1, average={'w': array([1., 1.])}, memory=())
    """
    check_state(like, "from_state_dict(like, saved)", "like")
    if is_tensordict(saved) or not isinstance(saved, Mapping):
        got = f"{type(saved).__name__}{advise(saved)}"
        raise TypeError(f"from_state_dict(like, saved): saved must be a dict, got {got}")
    leaves, spec = trees.flatten(like)
    names = _name_leaves(spec)
    _check_names(names, saved)
    state: AverageState[T] = trees.unflatten(spec, load_leaves(names, leaves, saved))
    return state


def _name_leaves(spec: Any) -> list[str]:
    """Return the name of each leaf of a state.

    Raises:
        ValueError: two leaves have one name.
    """
    names = trees.names(spec)
    firsts: dict[str, int] = {}
    for index, name in enumerate(names):
        first = firsts.setdefault(name, index)
        if first != index:
            raise ValueError(
                f"{_path(spec, first)} and {_path(spec, index)} would both be saved as {name!r}; rename one of the keys"
            )
    return names


def _check_names(names: list[str], saved: Mapping[str, Any]) -> None:
    known = dict.fromkeys(names)
    missing = [name for name in names if name not in saved]
    unexpected = [str(name) for name in saved if name not in known]
    if missing or unexpected:
        raise ValueError(
            f"the saved state does not have the structure of `like`: missing {trees.some(missing)}; unexpected "
            f"{trees.some(unexpected)}. Make `like` by the `init` of the rule that was saved, from the same params"
        )


def _path(spec: Any, index: int) -> str:
    return trees.paths(spec)[index].replace("tree", "state", 1)
