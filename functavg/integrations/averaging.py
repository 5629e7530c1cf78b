"""The average of what is trained in a model, beside the model and for a while inside it."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from functavg.kernels.torch import dtensor
from functavg.nn import pairing
from functavg.nn.buffers import UseBuffers, name_infinite
from functavg.nn.modes import unmerged
from functavg.nn.swap import swapped
from functavg.nn.writing import write
from functavg.rules.base import AveragingRule, check_rule
from functavg.saving import from_state_dict, to_state_dict
from functavg.scalars import is_host
from functavg.state import AverageState
from functavg.trees import some

AtEnd = Literal["average", "training"]


def check_arguments(rule: Any, at_end: str) -> AveragingRule:
    """Check the arguments that all callbacks have in common; return the rule.

    Raises:
        TypeError: ``rule`` is none.
        ValueError: ``at_end`` is neither of its two values.
    """
    if at_end not in ("average", "training"):
        raise ValueError(f"at_end must be 'average' or 'training', the weights to leave in the model, got {at_end!r}")
    return check_rule(rule)


class ModelAverage:
    """A state of a rule for the tensors of one model that are trained.

    These are the parameters that require a gradient, each once, and the buffers that are asked for. So a frozen base is
    neither averaged nor copied. Parameters that start to train later join then.

    Args:
        model: the model.
        rule: the rule to average by.
        use_buffers: whether real and complex buffers are averaged too, or ``f(name, buffer) -> bool``; of those that
            are persistent and hold no infinity now.
        device: where the average lives. Default: where the model is.
        dtype: dtype of the average. Default: that of the parameters, at least float32.
        backup_device: where the training weights are while the average is in the model. Default: where they were.
        names: parameters that are averaged whether or not they require a gradient now.

    Raises:
        TypeError: a parameter is sharded: a state in a file of one rank would be a part of the average.
        ValueError: nothing in the model is trained.
    """

    def __init__(
        self,
        model: Module,
        rule: AveragingRule,
        *,
        use_buffers: UseBuffers = False,
        device: Any = None,
        dtype: Any = None,
        backup_device: Any = None,
        names: Iterable[str] = (),
    ) -> None:
        self.model = model
        self.rule = rule
        self._use_buffers = use_buffers
        self._infinite = name_infinite(pairing.unwrap(model).named_buffers(remove_duplicate=False))
        self._placement = {"device": device, "dtype": dtype}
        self._backup_device = backup_device
        self._names = set(names)
        self._swap: AbstractContextManager[Module] | None = None
        self._swapped_buffers: frozenset[str] = frozenset()
        tensors = self._find_tensors()
        if not tensors:
            raise ValueError(
                f"no parameter of {type(model).__name__} requires a gradient, so there is nothing to average"
            )
        sharded = [name for name, tensor in tensors.items() if dtensor.is_sharded(tensor)]
        if sharded:
            raise TypeError(
                f"{some(sharded)} are sharded (FSDP2), which callbacks do not average. Do it in a loop of your own: "
                "functavg.AveragedModel(model, module=twin)"
            )
        self._names |= tensors.keys()
        self.state: AverageState[Any] = rule.init(tensors, **self._placement)

    # ---- averaging

    def update(self, model: Module | None = None) -> None:
        """Average in what the model holds now, one step after the last time."""
        del model
        tensors = self._find_tensors()
        state = self.state
        if not tensors.keys() <= self._names:
            state = self._grow(tensors)
        self.state = self.rule.update(tensors, state, inplace=True)
        self._names |= tensors.keys()

    def load(self, names: Iterable[str], read: Callable[[AverageState[Any]], AverageState[Any]]) -> None:
        """Go on from a saved average; what else is trained by now joins at the next update.

        Args:
            names: the names of the tensors that were averaged.
            read: returns the saved state, given one of its structure; its errors leave everything as it was.
        """
        names = set(names)
        tensors = self._find_tensors(self._names | names)
        like = {name: tensor for name, tensor in tensors.items() if name in names}
        self.state = read(self.rule.init(like or tensors, **self._placement))
        self._names = set(like or tensors)

    def _grow(self, tensors: dict[str, Tensor]) -> AverageState[Any]:
        grown = self.rule.extend(tensors, self.state)
        if self._placement["device"] is None and self._placement["dtype"] is None:
            return grown
        return from_state_dict(self.rule.init(tensors, **self._placement), to_state_dict(grown))

    def _find_tensors(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors to average by name: what is trained, and these; by default what was averaged before."""
        names = self._names if names is None else names
        pairing.reshard(self.model)
        model = pairing.unwrap(self.model)
        tensors: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad or name in names
        }
        for prefix, module in model.named_modules() if self._use_buffers else ():
            for name, buffer in module.named_buffers(recurse=False):
                path = f"{prefix}.{name}" if prefix else name
                if (
                    path not in self._infinite
                    and pairing.is_averageable(name, module, buffer)
                    and self._is_wanted(path, buffer)
                ):
                    tensors[path] = buffer
        return tensors

    def _is_wanted(self, path: str, buffer: Tensor) -> bool:
        return bool(self._use_buffers(path, buffer)) if callable(self._use_buffers) else self._use_buffers

    # ---- the average in the model

    def weights(self) -> Mapping[str, Tensor]:
        """Return the average by name, of several the first one; nothing before the first update."""
        if is_host(self.state.count) and self.state.count == 0:
            return {}
        weights: Mapping[str, Tensor] = self._find_first()[1]
        return weights

    def keys(self) -> dict[str, str]:
        """Return the key in ``to_state_dict`` of each of the tensors that :meth:`weights` returns after an update."""
        return {name: self.prefix() + name for name in self._find_first()[1]}

    def prefix(self) -> str:
        """Return what stands before the names of these tensors in the keys of ``to_state_dict``."""
        return ".".join([*self._find_first()[0], ""])

    def _find_first(self) -> tuple[list[str], Any]:
        """Return the first average and the keys that lead to it; there are several in Several, also in a nested one."""
        keys, tree = ["average"], self.state.average
        while not isinstance(next(iter(tree.values())), Tensor):
            key, tree = next(iter(tree.items()))
            keys.append(key)
        return keys, tree

    @property
    def is_inside(self) -> bool:
        """Whether the model holds the average now."""
        return self._swap is not None

    def enter(self, also: Mapping[str, Tensor] | None = None) -> None:
        """Put the average into the model, unless it is there.

        Args:
            also: further values to put there, or others, by name. Buffers among them may then be changed inside: they
                are kept over a while outside, and stay.
        """
        if self._swap is None:
            also = also or {}
            swap = swapped(self.model, {**self.weights(), **also}, backup_device=self._backup_device)
            swap.__enter__()
            self._swap, self._swapped_buffers = swap, frozenset(also)

    def leave(self) -> None:
        """Put the training weights back, unless they are there."""
        if self._swap is not None:
            swap, self._swap = self._swap, None
            swap.__exit__(None, None, None)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Put the average into the model for a block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Put the training weights into the model for a block, in which the average may be inside otherwise."""
        if self._swap is None:
            yield
            return
        buffers = self.copy_buffers(self._swapped_buffers)
        self.leave()
        try:
            yield
        finally:
            self.enter(buffers)

    def stay(self) -> None:
        """Leave the average in the model for good."""
        buffers = self.copy_buffers(self._swapped_buffers) if self._swap is not None else {}
        self.leave()
        with unmerged(self.model):
            write(self.model, {**self.weights(), **buffers})

    def copy_buffers(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Return copies of buffers of the model by name, of all or of some."""
        with torch.inference_mode(False), torch.no_grad():
            named = pairing.unwrap(self.model).named_buffers()
            return {name: buffer.clone() for name, buffer in named if names is None or name in names}
