"""Finds the modules of a model that keep running statistics, and reports those that cannot be estimated."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from functavg.nn.pairing import as_dict
from functavg.trees import some

STATISTICS = ("running_mean", "running_var")


@dataclass
class Norms:
    """The modules of a model that keep running statistics, by name."""

    known: dict[str, _NormBase] = field(default_factory=dict)  # norms of torch, and their subclasses
    scripted: dict[str, Module] = field(default_factory=dict)
    others: dict[str, Module] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.known or self.scripted or self.others)

    def find_device(self) -> torch.device:
        """Return the device of the statistics of the first module."""
        module: Module = next(iter((self.known or self.scripted or self.others).values()))
        return next(iter(_find_statistics(module).values())).device


def find_norms(model: Module) -> Norms:
    """Return the modules of a model that keep running statistics."""
    norms = Norms()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if _find_statistics(module):
                norms.scripted[name] = module
        elif isinstance(module, _NormBase):
            if module.track_running_stats and all(module._buffers.get(key) is not None for key in STATISTICS):
                norms.known[name] = module
        elif _find_statistics(module):
            norms.others[name] = module
    return norms


def _find_statistics(module: Module) -> dict[str, Tensor]:
    """Return the running statistics of a module of any class, recognised by their names."""
    tensors = as_dict(module._buffers) | as_dict(module._parameters)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor is not None
        and not tensor.requires_grad
        and name.startswith(("running_", "moving_"))
        and any(part in name for part in ("mean", "var", "std"))
    }


def check_unscripted(norms: Mapping[str, Module]) -> None:
    """Check that no TorchScript module has to be estimated, as none takes hooks or another momentum.

    Raises:
        TypeError: one is in training mode.
    """
    names = [name or "the model" for name, module in norms.items() if module.training]
    if names:
        raise TypeError(
            f"update_bn cannot estimate the statistics of {some(names)}, which torch.jit has scripted or traced. Call "
            "update_bn before torch.jit.script; or put these modules into eval mode inside a model in training mode, "
            "and they keep their statistics"
        )


@contextmanager
def watch_statistics(norms: Mapping[str, Module]) -> Iterator[dict[str, str]]:
    """Yield a dict that is filled after the block: the modules whose statistics changed inside, each with its class.

    After an error their buffers are restored.
    """
    changed: dict[str, str] = {}
    before = {
        name: {key: (tensor, tensor.clone()) for key, tensor in _find_state(norm).items()}
        for name, norm in norms.items()
    }
    try:
        yield changed
    except BaseException:
        for name, norm in norms.items():
            with torch.inference_mode():
                for key, (tensor, values) in before[name].items():
                    tensor.copy_(values)
                    setattr(norm, key, tensor)
        raise
    for name, norm in norms.items():
        after = _find_statistics(norm)
        if any(key not in before[name] or not torch.equal(before[name][key][1], after[key]) for key in after):
            changed[name] = type(norm).__name__


def _find_state(module: Module) -> dict[str, Tensor]:
    """Return what the forward of a module in training mode may change: its buffers and statistics."""
    found = module._buffers | _find_statistics(module)
    return {name: tensor for name, tensor in found.items() if tensor is not None and not is_lazy(tensor)}
