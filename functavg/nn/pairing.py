"""Pairs the tensors of an average with those of a model, by name, through wrappers at any depth."""

from __future__ import annotations

import sys

from torch.nn import Module

# Wrappers by module and class, so that nothing is imported to recognise them, with the attribute that holds the model.
_WRAPPERS = {
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def unwrap(module: Module) -> Module:
    """Return the model inside all wrappers, which are known by their class and never by an attribute's name.

    Raises:
        TypeError: it is a FullyShardedDataParallel, whose parameters are flat shards.
    """
    while True:
        if _is_instance(module, _FSDP1):
            raise TypeError(
                "FullyShardedDataParallel (FSDP1) holds its parameters as flat shards, which cannot be averaged by "
                "name. Use torch.distributed.fsdp.fully_shard (FSDP2), or average inside summon_full_params"
            )
        for wrapper, attribute in _WRAPPERS.items():
            if _is_instance(module, wrapper):
                module = getattr(module, attribute)
                break
        else:
            return module


def _is_instance(module: Module, wrapper: tuple[str, str]) -> bool:
    source, name = wrapper
    loaded = sys.modules.get(source)
    return loaded is not None and isinstance(module, getattr(loaded, name))
