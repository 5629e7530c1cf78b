"""Averages of the params in the state of an optax optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from functavg import trees
from functavg.integrations.requiring import require
from functavg.rules.base import AveragingRule, check_rule
from functavg.scalars import is_host
from functavg.state import AverageState, PyTree

if TYPE_CHECKING:
    import optax


def average_params(rule: AveragingRule, *, dtype: Any = None) -> optax.GradientTransformation:
    """Average the updated params, ``params + updates``, in the optimizer's state; the updates pass unchanged.

    It belongs last in the chain, where the updates are those that will be applied. The state is an ``AverageState``
    whose counts are arrays, so it goes through ``jax.jit``, ``jax.lax.scan``, ``jax.vmap`` and checkpointers with the
    rest of the optimizer's. Inside ``optax.MultiSteps`` and ``optax.apply_if_finite`` it averages after real steps
    only.

    Args:
        rule: the rule to average by.
        dtype: dtype of the real leaves of the average, as for ``rule.init``. Default: that of the params, and float32
            for those of less than 32 bits.

    Returns:
        A gradient transformation, whose ``update`` needs the params. :func:`get_average` reads the average.

    Raises:
        ImportError: optax is not installed.
        TypeError: ``rule`` is none.

    Example:
        >>> import functavg, jax.numpy as jnp, optax
        >>> from functavg.integrations.optax import average_params, get_average
        >>> optimizer = optax.chain(optax.sgd(0.5), average_params(functavg.SWA()))
        >>> params = {"w": jnp.ones(2)}
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update({"w": jnp.ones(2)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist(), get_average(state)["w"].tolist()  # the mean of 0.5 and 0.0
        ([0.0, 0.0], [0.25, 0.25])
    """
    library = require("optax", "optax")
    numpy = require("jax.numpy", "optax")
    rule = check_rule(rule)

    def as_array(leaf: Any) -> Any:
        # MultiSteps looks at the dtype of every leaf, and a host count would be weakly typed without one.
        return numpy.asarray(leaf, dtype=int if is_host(leaf) else None)

    def init(params: PyTree) -> AverageState[PyTree]:
        state: AverageState[PyTree] = trees.tree_map(as_array, rule.init(params, dtype=dtype))
        return state

    def update(
        updates: PyTree, state: AverageState[PyTree], params: PyTree = None
    ) -> tuple[PyTree, AverageState[PyTree]]:
        if params is None:
            raise ValueError("average_params needs the params: call optimizer.update(updates, state, params)")
        return updates, rule.update(library.apply_updates(params, updates), state)

    transformation: optax.GradientTransformation = library.GradientTransformation(init, update)
    return transformation


def get_average(opt_state: PyTree) -> PyTree:
    """Return the average that :func:`average_params` keeps in an optimizer's state, however deep.

    Args:
        opt_state: the state of the optimizer.

    Returns:
        The average, with the structure of the params; under ``Several`` a dict of them. ``functavg.cast_like(average,
        params)`` brings it to the params' dtypes. (``optax.tree_utils.tree_get(opt_state, "AverageState")`` is the
        whole state, unless its rule has more of them inside.)

    Raises:
        ImportError: optax is not installed.
        ValueError: the state holds no average, or more than one.
    """
    require("optax", "optax")
    nodes = require("jax.tree_util", "optax").tree_leaves(opt_state, is_leaf=_is_average_state)
    found = list(filter(_is_average_state, nodes))
    if len(found) != 1:
        raise ValueError(
            f"expected one average in the optimizer's state, got {len(found) or 'none'}. Put average_params(rule) "
            "once, last in the outermost chain; Several({name: rule}) keeps several averages"
        )
    return found[0].average


def _is_average_state(node: Any) -> bool:
    return isinstance(node, AverageState)
