"""What takes part: the limit, the peers that are installed, and functavg, each as a function that does one update."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import swa_utils as peer_swa_utils

import functavg
from functavg import swa_utils
from tests.benchmarks.measure import Work

DECAY = 0.999
PEERS = ("torch EMA multi", "torch EMA avg_fn", "ema-pytorch foreach", "torch_ema", "optax, jit and donation")
"""Those that average by the same EMA, where they are installed."""


def of_module(model: nn.Module) -> dict[str, Work]:
    """Return all that average the parameters of a float32 model."""
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        "limit": limit(model),
        "foreach_lerp_": raw_foreach(params),
        "AveragedModel EMA": _module(swa_utils.AveragedModel(model, rule=functavg.EMA(DECAY)), model),
        "AveragedModel SWA": _module(swa_utils.AveragedModel(model), model),
        "AveragedModel avg_fn": _module(swa_utils.AveragedModel(model, avg_fn=_avg_fn), model),
        "functional, in place": functional(functavg.EMA(DECAY), params, inplace=True),
        "functional, pure": functional(functavg.EMA(DECAY), params, inplace=False),
        "torch EMA multi": _torch_multi(model),
        "torch EMA avg_fn": _module(
            peer_swa_utils.AveragedModel(model, avg_fn=peer_swa_utils.get_ema_avg_fn(DECAY)), model
        ),
        "torch avg_fn": _module(peer_swa_utils.AveragedModel(model, avg_fn=_avg_fn), model),
        "torch SWA": _module(peer_swa_utils.AveragedModel(model), model),
        **_ema_pytorch(model),
        **_torch_ema(model),
        **_optax(params),
    }


def of_small(model: nn.Module) -> dict[str, Work]:
    """Return all that average the parameters of a small float32 model, beside a loop of ``lerp_``."""
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    averages = [new.clone() for new in params.values()]

    def loop() -> None:
        for average, new in zip(averages, params.values(), strict=True):
            average.lerp_(new, 1 - DECAY)

    return {
        "loop of lerp_": loop,
        "functional, in place": functional(functavg.EMA(DECAY), params, inplace=True),
        "AveragedModel EMA": _module(swa_utils.AveragedModel(model, rule=functavg.EMA(DECAY)), model),
        "torch EMA multi": _torch_multi(model),
        **_ema_pytorch(model),
        **_torch_ema(model),
    }


def of_many_low(model: nn.Module, low: nn.Module) -> dict[str, Work]:
    """Return what averages many tensors in float32 and in bfloat16, where the average is held in float32 beside."""
    return {
        f"{title}, {name}": _module(averaged, module)
        for name, module in (("float32", model), ("bfloat16", low))
        for title, averaged in (
            ("AveragedModel EMA", swa_utils.AveragedModel(module, rule=functavg.EMA(DECAY))),
            ("torch EMA multi", _make_torch_multi(module)),
        )
    }


def of_eager_jax(count: int = 1000, size: int = 512) -> dict[str, Work]:
    """Return what averages JAX arrays outside ``jit``; nothing where optax is not installed."""
    if importlib.util.find_spec("optax") is None:
        return {}
    import jax
    import optax

    params = {f"l{index}": jax.numpy.ones(size) for index in range(count)}
    update = functional(functavg.EMA(DECAY), params, inplace=False)
    states = [dict(params), dict(params)]
    jitted = jax.jit(lambda new, old: optax.incremental_update(new, old, 1 - DECAY))

    def step(index: int, fn: Any) -> None:
        states[index] = jax.block_until_ready(fn(params, states[index]))

    return {
        "optax.incremental_update": lambda: step(0, lambda new, old: optax.incremental_update(new, old, 1 - DECAY)),
        "functional": lambda: jax.block_until_ready(update()),
        "optax.incremental_update, jit": lambda: step(1, jitted),
    }


def of_new_memory(params: dict[str, torch.Tensor]) -> dict[str, Work]:
    """Return what makes new tensors in each update."""
    return {
        "foreach_lerp": raw_foreach_pure(params),
        "functional, pure": functional(functavg.EMA(DECAY), params, inplace=False),
    }


def of_low_precision(model: nn.Module) -> dict[str, Work]:
    """Return all that average a bfloat16 model in float32."""
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    averages = [parameter.float() for parameter in params.values()]
    rounded = [parameter.clone() for parameter in params.values()]
    weight = 1 - DECAY

    def per_leaf() -> None:
        for average, new in zip(averages, params.values(), strict=True):
            average.lerp_(new.float(), weight)

    def per_leaf_rounded() -> None:
        for average, new, out in zip(averages, params.values(), rounded, strict=True):
            average.lerp_(new.float(), weight)
            out.copy_(average)

    return {
        "limit": limit(model, bytes_each=10),
        "per leaf": per_leaf,
        "per leaf, with rounding": per_leaf_rounded,
        "functional, in place": functional(functavg.EMA(DECAY), params, inplace=True),
        "AveragedModel EMA": _module(swa_utils.AveragedModel(model, rule=functavg.EMA(DECAY)), model),
    }


def of_numpy(size: int = 50_000_000) -> dict[str, Work]:
    """Return what averages one large numpy array."""
    rng = np.random.default_rng(0)
    old, new = (rng.standard_normal(size, dtype=np.float32) for _ in range(2))
    weight = np.float32(1 - DECAY)
    rule = functavg.EMA(DECAY)
    return {
        "a + w * (b - a)": lambda: old + weight * (new - old),
        "functional, in place": functional(rule, {"w": new}, inplace=True),
    }


def limit(model: nn.Module, bytes_each: int = 12) -> Work:
    """Return one contiguous ``lerp_`` that moves as many bytes as the update of the model must."""
    total = sum(parameter.numel() for parameter in model.parameters()) * bytes_each // 12
    device = next(model.parameters()).device
    old, new = (torch.randn(total, device=device) for _ in range(2))
    return lambda: old.lerp_(new, 1 - DECAY)


def raw_foreach(params: dict[str, torch.Tensor]) -> Work:
    """Return one foreach call on prepared lists."""
    news = list(params.values())
    averages = [new.clone() for new in news]
    return lambda: torch._foreach_lerp_(averages, news, 1 - DECAY)


def raw_foreach_pure(params: dict[str, torch.Tensor]) -> Work:
    """Return one foreach call on prepared lists that allocates its results."""
    news = list(params.values())
    averages = [new.clone() for new in news]
    return lambda: torch._foreach_lerp(averages, news, 1 - DECAY)


def functional(rule: functavg.AveragingRule, params: Any, *, inplace: bool) -> Work:
    """Return the update of a functional state that has passed its first, which only copies; it returns the average."""
    states = [rule.update(params, rule.init(params))]

    def work() -> Any:
        states[0] = rule.update(params, states[0], inplace=inplace)
        return states[0].average

    return work


def _avg_fn(average: torch.Tensor, new: torch.Tensor, count: Any) -> torch.Tensor:
    return DECAY * average + (1 - DECAY) * new


def _module(averaged: Any, model: nn.Module) -> Work:
    averaged.update_parameters(model)
    return lambda: averaged.update_parameters(model)


def _make_torch_multi(model: nn.Module) -> Any:
    return peer_swa_utils.AveragedModel(model, multi_avg_fn=peer_swa_utils.get_ema_multi_avg_fn(DECAY))


def _torch_multi(model: nn.Module) -> Work:
    return _module(_make_torch_multi(model), model)


def _ema_pytorch(model: nn.Module) -> dict[str, Work]:
    if importlib.util.find_spec("ema_pytorch") is None:
        return {}
    from ema_pytorch import EMA

    ema = EMA(model, beta=DECAY, update_after_step=0, update_every=1, use_foreach=True)
    for _ in range(2):
        ema.update()
    return {"ema-pytorch foreach": ema.update}


def _torch_ema(model: nn.Module) -> dict[str, Work]:
    if importlib.util.find_spec("torch_ema") is None:
        return {}
    from torch_ema import ExponentialMovingAverage

    return {"torch_ema": ExponentialMovingAverage(model.parameters(), decay=DECAY, use_num_updates=False).update}


def _optax(params: dict[str, torch.Tensor]) -> dict[str, Work]:
    if importlib.util.find_spec("optax") is None or next(iter(params.values())).is_cuda:
        return {}
    import jax
    import optax

    news = {name: jax.numpy.asarray(new.numpy()) for name, new in params.items()}
    state = [{name: jax.numpy.array(new) for name, new in news.items()}]
    step = jax.jit(lambda new, old: optax.incremental_update(new, old, 1 - DECAY), donate_argnums=1)

    def work() -> None:
        state[0] = jax.block_until_ready(step(news, state[0]))

    return {"optax, jit and donation": work}
