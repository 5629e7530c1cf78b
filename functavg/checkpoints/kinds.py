"""Where other libraries keep an average in their checkpoints, one function for each."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Found:
    """An average as it is kept: by name, or a list in the order of the parameters, and the count, if there is one."""

    average: Mapping[str, Any] | list[Tensor]
    count: Any = None


def _averaged_model(it: Mapping[Any, Any]) -> Found | None:
    """torch.optim.swa_utils.AveragedModel, and functavg's: ``module.*`` and ``n_averaged``."""
    average = _under("module.", it)
    return Found(average, it["n_averaged"]) if average and "n_averaged" in it else None


def _ema_pytorch(it: Mapping[Any, Any]) -> Found | None:
    """EMA of ema-pytorch: ``ema_model.*`` and ``step``, which counts calls."""
    average = _under("ema_model.", it)
    return Found(average, it["step"]) if average and "step" in it else None


def _diffusers(it: Mapping[Any, Any]) -> Found | None:
    """EMAModel of diffusers: a list and ``optimization_step``."""
    return _listed(it, "optimization_step")


def _torch_ema(it: Mapping[Any, Any]) -> Found | None:
    """ExponentialMovingAverage of torch_ema: a list and ``num_updates``."""
    return _listed(it, "num_updates")


def _timm(it: Mapping[Any, Any]) -> Found | None:
    """Checkpoints of timm's train.py: ``state_dict_ema``."""
    return Found(it["state_dict_ema"]) if _has(it, "state_dict_ema") else None


def _timm_module(it: Mapping[Any, Any]) -> Found | None:
    """ModelEma of timm by itself: ``module.*``, as a model in DDP has, so it has to be named."""
    average = _under("module.", it)
    return Found(average) if average and len(average) == len(it) else None


def _lightning(it: Mapping[Any, Any]) -> Found | None:
    """Lightning's WeightAveraging, where the average is in the place of the model, and StochasticWeightAveraging."""
    if _has(it, "averaging_state", "current_model_state", "state_dict"):
        return Found(it["state_dict"], it["averaging_state"].get("n_averaged"))
    for state in _mappings(it.get("callbacks")):
        if isinstance(state.get("average_model_state"), Mapping):
            return Found(state["average_model_state"], state.get("n_averaged"))
    return None


def _composer(it: Mapping[Any, Any]) -> Found | None:
    """EMA of Composer: two dicts, which hold the trained weights while those of the model are the average."""
    whole: Mapping[Any, Any] = it["state"] if isinstance(it.get("state"), Mapping) else {"algorithms": [("EMA", it)]}
    algorithms = whole.get("algorithms") or []
    entries = algorithms.items() if isinstance(algorithms, Mapping) else algorithms
    for _, state in entries:
        kept = state.get("ema_model") if isinstance(state, Mapping) else None
        if isinstance(kept, Mapping) and "named_parameters_dict" in kept:
            if not state.get("ema_weights_active"):
                return Found({**kept["named_parameters_dict"], **kept.get("named_buffers_dict", {})})
            return Found(whole["model"]) if "model" in whole else None
    return None


def _nemo(it: Mapping[Any, Any]) -> Found | None:
    """EMAOptimizer of NeMo: a tuple in the order of the optimizer's parameters, and ``current_step``."""
    states = it["optimizer_states"] if _has(it, "optimizer_states") else [it]
    found = [state for state in states if isinstance(state, Mapping) and _has(state, "ema", "current_step")]
    return Found(list(found[0]["ema"]), found[0]["current_step"]) if len(found) == 1 else None


def _nemo_file(it: Mapping[Any, Any]) -> Found | None:
    """``*-EMA.ckpt`` of NeMo, in which the average is the ``state_dict``."""
    return Found(it["state_dict"]) if isinstance(it.get("state_dict"), Mapping) else None


# The most telling first.
KINDS: dict[str, list[Callable[[Mapping[Any, Any]], Found | None]]] = {
    "averaged_model": [_averaged_model],
    "ema_pytorch": [_ema_pytorch],
    "diffusers": [_diffusers],
    "torch_ema": [_torch_ema],
    "timm": [_timm],
    "lightning": [_lightning],
    "composer": [_composer],
    "nemo": [_nemo],
}
NAMED = {"timm": [_timm, _timm_module], "nemo": [_nemo, _nemo_file]}
"""What is tried where the kind is named: forms that a plain model has too."""


def find(checkpoint: Mapping[Any, Any], kind: str | None) -> tuple[str, Found] | None:
    """Return the kind of a checkpoint and the average in it, None if there is none of the kind, or of any."""
    kinds = KINDS if kind is None else {kind: NAMED.get(kind, KINDS[kind])}
    for name, readers in kinds.items():
        for read in readers:
            found = read(checkpoint)
            if found is not None:
                return name, found
    return None


def _listed(it: Mapping[Any, Any], count: str) -> Found | None:
    return Found(list(it["shadow_params"]), it[count]) if _has(it, "shadow_params", count) else None


def _under(prefix: str, it: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with a prefix, without it."""
    return {name[len(prefix) :]: it[name] for name in it if isinstance(name, str) and name.startswith(prefix)}


def _has(it: Mapping[Any, Any], *keys: str) -> bool:
    return all(key in it for key in keys)


def _mappings(of: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(of, Mapping):
        yield from (value for value in of.values() if isinstance(value, Mapping))
