"""What is in a file of weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functavg.checkpoints.converting import saved_count
from functavg.checkpoints.kinds import find
from functavg.checkpoints.nests import all_tensors
from functavg.checkpoints.opening import is_index, is_torch, open_file, weights_file
from functavg.checkpoints.records import NAME, record_in, record_of
from functavg.checkpoints.tensors import TensorInfo, info_of
from functavg.checkpoints.torch_reader import load, ties_of


@dataclass(frozen=True)
class Holding:
    """A dict of tensors in a file.

    Attributes:
        key: the keys that lead to it, joined by dots; what ``key=`` takes. Empty for the file itself.
        tensors: the number of tensors, of tied ones one.
        elements: the number of their elements.
        nbytes: the number of their bytes.
        dtypes: the number of tensors of each dtype.
        ties: names of tensors that are one, a list for each.

    Example:
        >>> from functavg.checkpoints import Holding
        >>> Holding("model", tensors=1, elements=6, nbytes=24, dtypes={"float32": 1}, ties=[]).nbytes
        24
    """

    key: str
    tensors: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]
    ties: list[list[str]]


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found.

    Attributes:
        path: the file.
        format: ``"safetensors"``, ``"torch"`` or ``"shards"``.
        kind: the library whose average it holds, as :func:`convert` names them; None where none is known.
        count: the steps that were averaged, where it says so.
        record: what functavg wrote about how the file came about; empty in others.
        metadata: the metadata of a safetensors file.
        holds: its dicts of tensors.

    Example:
        >>> import os, tempfile, torch
        >>> from functavg import checkpoints
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "run.pt")
        ...     torch.save({"model": {"w": torch.zeros(2, 3)}, "epoch": 4}, file)
        ...     found = checkpoints.inspect(file)
        >>> found.format, [(held.key, held.elements) for held in found.holds]
        ('torch', [('model', 6)])
    """

    path: Path
    format: str
    kind: str | None
    count: int | None
    record: dict[str, Any]
    metadata: dict[str, str]
    holds: list[Holding]


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Return what a file of weights holds: averages, counts, dtypes, ties. Of safetensors, only the header is read.

    Args:
        path: a file or folder, as for :func:`average`.

    Raises:
        CheckpointError: it is no such file, or not whole.

    Example:
        >>> import functavg, tempfile, torch
        >>> averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
        >>> path = f"{tempfile.mkdtemp()}/averaged.pt"
        >>> torch.save(averaged.state_dict(), path)
        >>> found = functavg.checkpoints.inspect(path)
        >>> found.kind, found.count, found.holds[0].dtypes
        ('averaged_model', 0, {'int64': 1, 'float32': 2})
    """
    folder = Path(path)
    file = weights_file(folder)
    if not is_index(file) and is_torch(file):
        held = load(file)
        record = record_in(held)
        holds = [
            _holding(key, {name: info_of(tensor) for name, tensor in tensors.items()}, ties_of(tensors))
            for key, tensors in all_tensors(held)
        ]
        return Inspection(file, "torch", *_average(held, record, folder), record, {}, holds)
    reader = open_file(file)
    record = record_of(reader)
    metadata = {name: value for name, value in reader.metadata.items() if name != NAME and name not in reader.ties}
    holds = [_holding("", reader.infos, reader.ties)]
    form = "shards" if is_index(file) else "safetensors"
    return Inspection(file, form, *_average(reader.outline(), record, folder), record, metadata, holds)


def _holding(key: str, infos: Mapping[str, TensorInfo], ties: Mapping[str, str]) -> Holding:
    distinct = {name: info for name, info in infos.items() if name not in ties}
    groups: dict[str, list[str]] = {}
    for name, first in ties.items():
        groups.setdefault(first, [first]).append(name)
    return Holding(
        key,
        len(distinct),
        sum(info.numel for info in distinct.values()),
        sum(info.nbytes for info in distinct.values()),
        dict(Counter(info.dtype for info in distinct.values())),
        list(groups.values()),
    )


def _average(held: Any, record: dict[str, Any], folder: Path) -> tuple[str | None, int | None]:
    """Return the library whose average it is and the count, None for what is not known."""
    if record.get("kind") == "state":
        return "functavg", record["numbers"].get("count")
    saved = saved_count(folder)
    if saved is not None:
        return "diffusers", saved
    found = find(held, None) if isinstance(held, Mapping) else None
    if found is None:
        return None, None
    kind, average = found
    return kind, None if average.count is None else int(average.count)
