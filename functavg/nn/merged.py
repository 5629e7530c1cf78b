"""Recognises layers that merge other weights into one in eval mode, such as LoRA layers, and keeps averages off them.

The weight of a merged layer is not what is trained. Averaged with others, swapped or taken back later, it leaves a base
weight that never was. Nothing says which classes do this, so their code is asked.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

_WORDS = ("merge", "fuse", "reparam")
_HARMLESS = {"requires_grad_", "zero_", "fill_", "detach_", "share_memory_", "requires_grad", "training"}


class _Code(NamedTuple):
    """What the code of a class says about merging."""

    merges: bool  # that it does so in train or eval
    assigned: frozenset[str]  # attributes that train or eval assigns to, which may be parameters
    has_methods: bool  # that it does so when told to


_known: WeakKeyDictionary[type, _Code] = WeakKeyDictionary()  # some classes are made for one module


def can_merge(kind: type) -> bool:
    """Tell whether modules of a class may merge weights: in ``train`` or ``eval``, or when they are told to.

    That is a class that overrides ``train`` or ``eval`` with code, in that method or in methods and functions that it
    calls, which reads a name such as ``merged``, reaches for ``data``, calls an in-place method of a tensor, or assigns
    to attributes that ``check_unmerged`` finds to be parameters; or one that has the methods ``merge`` and ``unmerge``.
    An override that puts parts into another mode, stops their gradients or resets buffers is none of these.
    """
    code = _read(kind)
    return code.merges or code.has_methods or bool(code.assigned)


def check_unmerged(module: Module, name: str, owner: str) -> None:
    """Check that a module holds weights that are not merged.

    Args:
        module: the module.
        name: its name, for the message; of the whole model "".
        owner: whose module it is, ``"model"`` or ``"average"``.

    Raises:
        ValueError: it is merged.
    """
    if _is_merged(module):
        raise ValueError(
            f"{name or 'the whole'} ({type(module).__name__}) of the {owner} holds merged weights, as it does in eval "
            "mode. They cannot be averaged, exchanged or unmerged later together with others. Put the model and the "
            "average into training mode before an update (model.train(), averaged.train()), and enter swapped before "
            "model.eval()"
        )


@contextmanager
def unmerged(model: Module) -> Iterator[None]:
    """Take apart what layers of a model have merged, so that weights can be written, and let them merge again after."""
    merged = [layer for layer in model.modules() if _is_merged(layer)]
    modes = [{module: module.training for module in layer.modules()} for layer in merged]
    for layer in merged:
        layer.train() if _merges_in_eval(layer) else layer.unmerge()  # type: ignore[operator]
    try:
        yield
    finally:
        for layer, before in zip(merged, modes, strict=True):
            layer.eval() if _merges_in_eval(layer) else layer.merge()  # type: ignore[operator]
            for module, mode in before.items():
                module.training = mode


def _is_merged(module: Module) -> bool:
    """Tell whether a module has merged weights: by its flag, without one by its mode."""
    if not can_merge(type(module)):
        return False
    flag = getattr(module, "merged", None)
    return flag if isinstance(flag, bool) else _merges_in_eval(module) and not module.training


def _merges_in_eval(module: Module) -> bool:
    """Tell whether a module merges in eval mode."""
    code = _read(type(module))
    parameters = (name for part in (module, *module.children()) for name in part._parameters)
    return code.merges or not code.assigned.isdisjoint(parameters)


def _read(kind: type) -> _Code:
    if kind not in _known:
        names, assigned = set[str](), set[str]()
        for code in _codes(kind):
            names.update(code.co_names)
            assigned.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
        writes = {name for name in names - _HARMLESS if name.endswith("_") and hasattr(torch.Tensor, name)}
        speaks = any(word in name.lower() for name in names - assigned for word in _WORDS)
        has_methods = all(callable(getattr(kind, name, None)) for name in ("merge", "unmerge"))
        _known[kind] = _Code(bool(writes) or "data" in names or speaks, frozenset(assigned - _HARMLESS), has_methods)
    return _known[kind]


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of ``train`` and ``eval`` of a class and of what they call, except torch's."""
    seen = set[CodeType]()
    found: list[Any] = [vars(base)[name] for base in kind.__mro__ for name in ("train", "eval") if name in vars(base)]
    while found:
        function = found.pop()
        if isinstance(function, property):
            function = function.fget
        elif isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if isinstance(function, FunctionType):
            function = inspect.unwrap(function)  # what decorators such as torch.no_grad have wrapped
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        if function.__module__.split(".")[0] == "torch":
            continue
        parts = [function.__code__]
        while parts:  # functions and comprehensions within it too
            code = parts.pop()
            seen.add(code)
            yield code
            parts += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            found += [inspect.getattr_static(kind, name, None) for name in code.co_names]
            found += [function.__globals__.get(name) for name in code.co_names]
