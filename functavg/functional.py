"""One step, bring back, grow: what is done with averages beside updating them."""

from __future__ import annotations

from typing import Any

from functavg import kernels, trees
from functavg.plan import Lerp, identities, run
from functavg.rules.base import AveragingRule
from functavg.state import AverageState, PyTree, T, Weight


def lerp(average: T, params: PyTree, weight: Weight, /, *, inplace: bool = False) -> T:
    """Return ``average + weight * (params - average)``: one step towards the params, without a count.

    For target networks (``weight`` is then often called tau), and for writing an average back into a model.

    Args:
        average: any pytree of arrays.
        params: the tree to step towards, of the same structure and shapes.
        weight: a finite number, or a 0-d array on the device. Exactly 1 copies, exactly 0 does nothing; integers and
            bools take the newest value.
        inplace: whether to reuse the memory of ``average``. Default: ``False``.

    Returns:
        The tree after the step, in the dtypes of ``average``.

    Raises:
        TypeError, ValueError: the params do not fit the average, or the weight is no finite number. Nothing was
            changed then.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.lerp({"w": np.zeros(2)}, {"w": np.ones(2)}, 0.25)
        {'w': array([0.25, 0.25])}

    Source: optax.incremental_update.
    """
    result: T = run(Lerp(average, params, weight), inplace=inplace)
    return result


def cast_like(tree: T, like: PyTree) -> T:
    """Return the tree with the dtypes and devices of another, such as an average in those of the params.

    Args:
        tree: any pytree of arrays.
        like: a tree of the same structure.

    Returns:
        The tree; a leaf that has the dtype and the device already is the same array, as with ``torch.Tensor.to``.

    Raises:
        TypeError: a leaf is no array of the kind of its counterpart.
        ValueError: the trees differ in structure.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.cast_like({"w": np.zeros(1)}, {"w": np.ones(1, np.float32)})["w"].dtype
        dtype('float32')
    """
    leaves, spec = trees.flatten(tree)
    likes, like_spec = trees.flatten(like)
    likes = trees.align(spec, like_spec, likes)
    names = [kernels.kernel_name(leaf) for leaf in likes]
    for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        theirs = kernels.kernel_name(leaf)
        if name is None or (theirs != name and (theirs, name) != ("numpy", "array_api")):
            raise TypeError(
                f"{trees.paths(spec)[index]}: expected arrays of one library, "
                f"got {type(leaf).__name__} to bring into the form of {type(likes[index]).__name__}"
            )
    casts: dict[Any, Any] = {}  # leaves that are shared, and to be of one form, stay shared
    forms = [(getattr(it, "dtype", type(it)), getattr(it, "device", None)) for it in likes]
    keys = list(zip(identities(leaves), forms, strict=True))
    for key, leaf, it, name in zip(keys, leaves, likes, names, strict=True):
        if key not in casts:
            casts[key] = kernels.load(name).cast(leaf, it)
    result: T = trees.unflatten(spec, [casts[key] for key in keys])
    return result


def extend(rule: AveragingRule, state: AverageState[Any], params: T) -> AverageState[T]:
    """Return the state grown to params that have more leaves: new tokens' rows aside, a block or an adapter.

    It is ``rule.init(params)`` with every leaf that the old state knows, by path. New leaves start from the params
    and share the clock, but for a ``Partition``, which gives them that of their label.

    Args:
        rule: the rule that made the state.
        state: the state to grow.
        params: the params with all leaves, the old ones in their old shapes.

    Returns:
        The grown state; leaves that the old one knows are the same arrays.

    Raises:
        TypeError: ``state`` is no AverageState, or a new leaf cannot be averaged.
        ValueError: a leaf of the old state would vanish or change its shape.

    Example:
        >>> import functavg, numpy as np
        >>> rule = functavg.EMA(0.9)
        >>> state = rule.update({"a": np.ones(1)}, rule.init({"a": np.zeros(1)}))
        >>> functavg.extend(rule, state, {"a": np.zeros(1), "b": np.zeros(1)})
        AverageState(count=1, average={'a': array([1.]), 'b': array([0.])}, memory=())
    """
    if not isinstance(state, AverageState):
        raise TypeError(f"extend(rule, state, params): state must be an AverageState, got {type(state).__name__}")
    leaves, spec = trees.flatten(rule.init(params))
    old_leaves, old_spec = trees.flatten(state)
    places = {path: index for index, path in enumerate(spec.paths())}
    for name, path, old in zip(trees.paths(old_spec), old_spec.paths(), old_leaves, strict=True):
        if path not in places:
            raise ValueError(
                f"{name.replace('tree', 'state', 1)} would vanish: the params have no such leaf. "
                "Pass params with every leaf that the state knows, or start anew with `init`"
            )
        shape, new_shape = (tuple(getattr(leaf, "shape", ())) for leaf in (old, leaves[places[path]]))
        if shape != new_shape:
            raise ValueError(
                f"{name.replace('tree', 'state', 1)} has shape {shape}, the params have {new_shape}; "
                "extend adds leaves and resizes none"
            )
        leaves[places[path]] = old
    grown: AverageState[T] = trees.unflatten(spec, leaves)
    return grown
