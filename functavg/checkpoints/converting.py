"""Reading the averages of other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from functavg.checkpoints.arrays import memory_of
from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.kinds import KINDS, Found, find
from functavg.checkpoints.opening import is_index, is_torch, open_file, open_weights, weights_file
from functavg.checkpoints.readers import some
from functavg.checkpoints.records import record_in, record_of
from functavg.checkpoints.tensors import reading
from functavg.checkpoints.torch_reader import load
from functavg.checkpoints.wrappers import strip_wrappers
from functavg.checks import check_count
from functavg.state import AverageState

Form = Literal["weights", "averaged_model", "state"]
FORMS = ("weights", "averaged_model", "state")


def convert(
    source: str | os.PathLike[str] | Mapping[str, Any],
    kind: str | None = None,
    *,
    to: Form = "weights",
    names: Iterable[str] | nn.Module | None = None,
    count: int | None = None,
) -> Any:
    """Return the average in a checkpoint of another library, by the names of the model's own tensors.

    Prefixes of wrappers are taken off: ``module.`` before all names; ``_orig_mod.``, ``_checkpoint_wrapped_module.``
    and ``_fsdp_wrapped_module.`` anywhere.

    Args:
        source: a file of ``torch.save`` or of safetensors, a folder of diffusers' ``EMAModel.save_pretrained``, or what
            such a file holds, such as ``ema.state_dict()``.
        kind: ``"averaged_model"`` (torch), ``"ema_pytorch"``, ``"torch_ema"``, ``"timm"``, ``"diffusers"``,
            ``"lightning"`` (its WeightAveraging and StochasticWeightAveraging), ``"composer"``, ``"nemo"``, or
            ``"functavg"``, a file of :func:`save_state`. Default: found out. To be named are timm's ModelEma by itself
            and ``*-EMA.ckpt`` of NeMo, which look like plain models.
        to: ``"weights"``, a dict of tensors; ``"averaged_model"``, the state_dict of an AveragedModel; or ``"state"``,
            an ``AverageState`` of such a dict, to go on with any rule that has no memory. Default: ``"weights"``.
        names: the names of the parameters in their order, or the model itself, for kinds that keep a list: torch_ema,
            diffusers and NeMo (there in the order of the optimizer).
        count: the steps that were averaged. Default: what the checkpoint says; timm and Composer say nothing.

    Returns:
        What ``to`` says, with the tensors only; what modules keep as ``_extra_state`` is left out. They share no
        memory with a ``source`` that is a dict; those of a file of ``torch.save`` are mapped into memory.

    Raises:
        CheckpointError: there is no average of the kind, or of any; the message tells what there is.
        TypeError: ``source`` is neither a path nor a dict.
        ValueError: an argument is unknown or missing.

    Example:
        >>> import functavg, torch
        >>> averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1, bias=False))
        >>> list(functavg.checkpoints.convert(averaged.state_dict()))
        ['weight']
        >>> functavg.checkpoints.convert(averaged.state_dict(), to="state").count
        0
    """
    if kind is not None and kind not in (*KINDS, "functavg"):
        raise ValueError(f"kind must be one of {', '.join([*KINDS, 'functavg'])}, got {kind!r}")
    if to not in FORMS:
        raise ValueError(f"to must be one of {', '.join(FORMS)}, got {to!r}")
    if isinstance(source, (str, os.PathLike)):
        where, (kind, found) = str(source), _in_file(Path(source), kind)
    elif isinstance(source, Mapping):
        where, (kind, found) = "the source", _in_dict("the source", source, kind)
    else:
        raise TypeError(f"source must be a path or a dict, got {type(source).__name__}")
    average = _named(where, kind, found.average, names)
    if isinstance(source, Mapping):
        average = _copied(average)
    if to == "weights":
        return average
    steps = found.count if count is None else count
    if steps is None:
        raise ValueError(f"{where}: {kind} does not say how many steps were averaged; pass count= (--count)")
    steps = int(check_count(int(steps), "count", 0))
    if to == "state":
        return AverageState(steps, average)
    return {
        "n_averaged": torch.tensor(steps, device="cpu"),
        **{f"module.{name}": tensor for name, tensor in average.items()},
    }


def _in_file(path: Path, kind: str | None) -> tuple[str, Found]:
    """Return the kind of a file and the average in it, of which no other tensors are read."""
    file = weights_file(path)
    saved = saved_count(path)
    if saved is not None and kind in (None, "diffusers"):
        return "diffusers", Found(open_weights(path).read_all(), saved)
    held = load(file) if not is_index(file) and is_torch(file) else None
    reader = open_file(file) if held is None else None
    record = record_in(held) if reader is None else record_of(reader)
    if kind in (None, "functavg") and record.get("kind") == "state":
        return "functavg", Found(open_weights(file).read_all(), record["numbers"].get("count"))
    if reader is None:
        return _in_dict(str(path), held, kind)
    outline = reader.outline()
    known, found = _in_dict(str(path), outline, kind)
    if not isinstance(found.average, Mapping):
        return known, found
    names = {id(tensor): name for name, tensor in outline.items()}
    chosen = {short: names[id(tensor)] for short, tensor in found.average.items()}
    read = reader.read_all(chosen.values())
    return known, replace(found, average={short: read[name] for short, name in chosen.items()})


def saved_count(folder: Path) -> int | None:
    """Return the count that diffusers saves in the configuration of an averaged model, None where there is none."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    with reading(config):
        text = config.read_text()
    try:
        count = json.loads(text).get("optimization_step")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{config}: corrupt: no configuration of a model ({error})") from error
    return None if count is None else int(count)


def _in_dict(where: str, held: Any, kind: str | None) -> tuple[str, Found]:
    found = find(held, kind) if isinstance(held, Mapping) and kind != "functavg" else None
    if found is None:
        seen = f"a dict with the keys {some(held)}" if isinstance(held, Mapping) else type(held).__name__
        wanted = "an average of a known kind (" + ", ".join([*KINDS, "functavg"]) + ")" if kind is None else kind
        raise CheckpointError(f"{where}: expected {wanted}, got {seen}" + _hint(held, kind))
    return found


def _hint(held: Any, kind: str | None) -> str:
    if kind is not None or not isinstance(held, Mapping) or not held:
        return ""
    if all(isinstance(name, str) and name.startswith("module.") for name in held):
        return ". ModelEma of timm has such names, and so has a model in DDP: kind='timm' says that it is an average"
    return ". Where it is weights and no average, average and key= read it"


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors; those that are tied stay tied."""
    copies: dict[Any, Tensor] = {}
    for name, tensor in tensors.items():
        copies.setdefault(memory_of(tensor) or name, tensor.detach().clone())
    return {name: copies[memory_of(tensor) or name] for name, tensor in tensors.items()}


def _named(where: str, kind: str, average: Any, names: Iterable[str] | nn.Module | None) -> dict[str, Tensor]:
    """Return the average as a dict of tensors."""
    if isinstance(average, Mapping):
        return strip_wrappers({name: value for name, value in average.items() if isinstance(value, Tensor)})
    if names is None:
        raise ValueError(
            f"{where}: {kind} keeps a list of {len(average)} tensors; pass names=, their names in order or the model"
        )
    params = dict(names.named_parameters()) if isinstance(names, nn.Module) else dict.fromkeys(names)
    if len(params) != len(average):
        raise ValueError(f"{where}: names must hold one name for each of {len(average)} tensors, got {len(params)}")
    named = dict(zip(params, average, strict=True))
    for name, param in params.items():
        if param is not None and param.shape != named[name].shape:
            raise CheckpointError(
                f"{where}: {name!r} has shape {tuple(named[name].shape)}, that of the model {tuple(param.shape)}; "
                "are the names in the order of the list?"
            )
    return strip_wrappers(named)
