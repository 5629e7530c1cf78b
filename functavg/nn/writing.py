"""Writes averages into a model, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from functavg.functional import lerp
from functavg.nn import pairing
from functavg.nn.derived import drop_derived_values
from functavg.trees import some


def targets(model: Module, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model that the values are for, and the values; a tensor of two names is written once.

    Raises:
        ValueError: the model has no such tensors; the message names them.
    """
    known = dict(pairing.tensors(model))
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"the model has no tensors named {some(unknown)}; it has {some(list(known))}. "
            "Names are those of named_parameters and named_buffers, without those of wrappers"
        )
    distinct = {id(known[name]): name for name in reversed(list(values))}
    return {name: known[name] for name in distinct.values()}, {name: values[name] for name in distinct.values()}


def write(model: Module, values: Mapping[str, Any]) -> None:
    """Copy values into the tensors of a model in place; sharded parameters are sharded before and after.

    Raises:
        TypeError, ValueError: a value does not fit; nothing was written.
    """
    pairing.reshard(model)
    tensors, news = targets(model, values)
    lerp(tensors, news, 1.0, inplace=True)
    drop_derived_values()
    pairing.reshard(model)
