"""What is done with averages besides updating them: one step without a count, and a cast to the params' dtypes."""

from __future__ import annotations

__all__ = ["cast_like", "lerp"]

from typing import Any

from functavg import kernels, trees
from functavg.advice import advise
from functavg.plan import Lerp, identities, run
from functavg.state import PyTree, T, Weight


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
        TypeError, ValueError: the params do not fit the average, or the weight is not a finite number. Nothing was
            changed then.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.lerp({"w": np.zeros(2)}, {"w": np.ones(2)}, 0.25)
        {'w': array([0.25, 0.25])}

    Source: optax.incremental_update.
    """
    result: T = run(Lerp(average, params, weight), inplace=inplace)
    return result


def cast_like(tree: T, like: PyTree, /) -> T:
    """Return the tree with the dtypes and devices of another, such as an average in those of the params.

    Args:
        tree: any pytree of arrays.
        like: a tree of the same structure.

    Returns:
        The tree; a leaf that has the dtype and the device already is the same array, as with ``torch.Tensor.to``.

    Raises:
        TypeError: a leaf is not an array of the kind of its counterpart.
        ValueError: the trees differ in structure.

    Example:
        >>> import functavg, numpy as np
        >>> functavg.cast_like({"w": np.zeros(1)}, {"w": np.ones(1, np.float32)})["w"].dtype
        dtype('float32')
    """
    leaves, spec = trees.flatten(tree)
    likes, like_spec = trees.flatten(like)
    likes = trees.align(spec, like_spec, likes, leaves)
    names = [kernels.kernel_name(leaf) for leaf in likes]
    for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        theirs = kernels.kernel_name(leaf)
        if name is None or (theirs != name and (theirs, name) != ("numpy", "array_api")):
            advice = advise(leaf) or advise(likes[index])
            raise TypeError(
                f"{trees.paths(spec)[index]}: expected arrays of one library, "
                f"got {type(leaf).__name__} to cast like {type(likes[index]).__name__}{advice}"
            )
    casts: dict[Any, Any] = {}  # tied leaves stay tied where they are cast to one placement
    placements = [(getattr(it, "dtype", type(it)), getattr(it, "device", None)) for it in likes]
    keys = list(zip(identities(leaves), placements, strict=True))
    for key, leaf, it, name in zip(keys, leaves, likes, names, strict=True):
        if key not in casts:
            casts[key] = kernels.load(name).cast(leaf, it)
    result: T = trees.unflatten(spec, [casts[key] for key in keys])
    return result
