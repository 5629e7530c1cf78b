"""Follows the steps of optimizers, also of those that launchers have wrapped."""

from __future__ import annotations

__all__: list[str] = []

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Attachment:
    """What ``attach`` returns: ``remove()``, or the end of a ``with`` block, ends the updates."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hooks from all optimizers."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def attach(update: Callable[[Module], None], optimizer: Optimizer | Iterable[Optimizer], model: Module) -> Attachment:
    """Call ``update(model)`` after every step of an optimizer; with several, once each has stepped since the last call.

    Args:
        update: the function to call.
        optimizer: one optimizer or several, bare or in wrappers that are optimizers and hold it as ``optimizer``.
        model: the model that they train.

    Raises:
        TypeError: the arguments are swapped, or something is not an optimizer or has no hooks; nothing was attached.
    """
    optimizers = {id(found): found for found in map(_unwrap, _list_optimizers(optimizer, model))}
    waiting = set(optimizers)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if _is_skipped(optimizer) or _is_nested(optimizer):
            return
        waiting.discard(id(optimizer))
        if not waiting:
            waiting.update(optimizers)
            update(model)

    return Attachment([found.register_step_post_hook(after_step) for found in optimizers.values()])


def _list_optimizers(optimizer: Any, model: Any) -> list[Any]:
    """Return the optimizers as a list, after checking which argument is which."""
    if isinstance(optimizer, Module):
        is_swapped = isinstance(model, Optimizer)
        what = "the arguments are swapped" if is_swapped else f"optimizer must be no module, got {_name(optimizer)}"
        raise TypeError(f"attach(optimizer, model): {what}. The optimizer comes first, then the model that it trains")
    if not isinstance(model, Module):
        raise TypeError(
            f"attach(optimizer, model): model must be the torch.nn.Module that is averaged, got {_name(model)}"
        )
    is_one = isinstance(optimizer, Optimizer) or not isinstance(optimizer, (Collection, Iterator))
    found = [optimizer] if is_one else list(optimizer)
    if not found:
        raise TypeError("attach(optimizer, model): optimizer must be an optimizer or several, got none")
    return found


def _unwrap(optimizer: Any) -> Optimizer:
    """Return the optimizer that has hooks, inside wrappers such as accelerate's, which have none."""
    outer, seen = optimizer, set[int]()
    while isinstance(optimizer, Optimizer) and id(optimizer) not in seen:
        # Optimizer.__init__ makes the hooks, and wraps the step of the class to run them. Some wrappers only make them.
        if hasattr(optimizer, "_optimizer_step_post_hooks") and getattr(type(optimizer).step, "hooked", False):
            return optimizer
        seen.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", None)
    if not isinstance(outer, Optimizer):
        holds = isinstance(getattr(outer, "optimizer", None), Optimizer)
        hint = f"Pass the optimizer itself, such as the {_name(outer)}'s .optimizer" if holds else "Pass the optimizer"
        raise TypeError(
            "attach(optimizer, model): optimizer must be a torch.optim.Optimizer or a list of them, "
            f"got {_name(outer)}. {hint}, or call update_parameters(model) after each of its steps"
        )
    raise TypeError(
        f"attach(optimizer, model): {_name(outer)} runs no hooks after its steps, and holds no optimizer in .optimizer "
        "that does. Attach to the optimizer inside it, or call update_parameters(model) after each of its steps"
    )


def _is_skipped(optimizer: Optimizer) -> bool:
    """Tell whether the step changed nothing: a GradScaler calls a fused one even on overflow, and sets this flag."""
    found_inf = getattr(optimizer, "found_inf", None)  # set around the step, on the device
    return found_inf is not None and bool(found_inf.item())


def _is_nested(optimizer: Optimizer) -> bool:
    """Tell whether this is the step of a base class within the step of its subclass; both run the hooks."""
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    if sum(getattr(step, "hooked", False) for step in steps) < 2:
        return False
    frame = sys._getframe(2)  # torch's, which runs the step and then its hooks
    code, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is code and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False


def _name(value: object) -> str:
    return type(value).__name__
