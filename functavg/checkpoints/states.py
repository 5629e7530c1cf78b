"""States of rules in files that describe themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from functavg.checkpoints.arrays import to_numpy
from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.expressions import parse_rule
from functavg.checkpoints.opening import open_file
from functavg.checkpoints.records import VERSION, make_record, record_of
from functavg.checkpoints.storing import store
from functavg.rules.base import AveragingRule, check_rule
from functavg.saving import from_state_dict, to_state_dict
from functavg.state import AverageState


def save_state(path: str | os.PathLike[str], state: AverageState[Any], rule: AveragingRule) -> None:
    """Write a state and the rule that made it to a file, as a whole or not at all.

    The file holds the arrays by the names of the flat dict of a state, ``average.encoder.weight``, and beside them a
    record: what the file is, its version, the rule as it prints, and the host numbers of the state such as the count.
    Arrays that share memory are stored once.

    Args:
        path: the file, in ``.safetensors``; or in ``.pt``, which holds the few dtypes that safetensors does not.
        state: the state of any rule, with arrays of any library.
        rule: the rule that goes on with it. One with a function of the user's is noted, but not to be loaded.

    Raises:
        TypeError: ``state`` is no state, ``rule`` is no rule, or an array cannot be stored.
        CheckpointError: the file cannot be written; it is then as it was.

    Example:
        >>> import functavg, numpy as np, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "average.safetensors")
        >>> rule, params = functavg.EMA(0.9), {"w": np.ones(2)}
        >>> functavg.checkpoints.save_state(path, rule.update(params, rule.init(params)), rule)
        >>> functavg.checkpoints.load_state(path, {"w": np.zeros(2)})
        AverageState(count=1, average={'w': array([1., 1.])}, memory=())
    """
    check_rule(rule)
    flat = to_state_dict(state)
    numbers = {name: value for name, value in flat.items() if type(value) in (bool, int, float)}
    arrays = {name: value for name, value in flat.items() if name not in numbers}
    store(Path(path), arrays, make_record("state", rule=repr(rule), numbers=numbers))


def load_state(path: str | os.PathLike[str], like: Any) -> AverageState[Any]:
    """Return the state in a file of :func:`save_state`.

    Args:
        path: the file.
        like: a state of the structure and shapes to load, as ``rule.init(params)`` makes it, whose libraries, dtypes
            and devices the arrays get; or the params themselves, from which the rule in the file makes it.

    Raises:
        CheckpointError: the file is no such file or not whole, or names or shapes are not those of ``like``.

    Example:
        >>> import os, tempfile, functavg, numpy as np
        >>> from functavg import checkpoints
        >>> params, rule = {"w": np.zeros(2)}, functavg.EMA(0.9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "ema.safetensors")
        ...     checkpoints.save_state(file, rule.update(params, rule.init(params)), rule)
        ...     state = checkpoints.load_state(file, params)
        >>> state.count, type(state.average["w"]).__name__
        (1, 'ndarray')
    """
    file = Path(path)
    reader = open_file(file)
    record = _state_record(file, record_of(reader))
    if not isinstance(like, AverageState):
        like = _rule(file, record).init(like)
    forms = to_state_dict(like)
    saved: dict[str, Any] = dict(record["numbers"])
    for name in reader.infos:
        tensor = reader.read(name)
        saved[name] = tensor if isinstance(forms.get(name, tensor), Tensor) else to_numpy(tensor)
    try:
        return from_state_dict(like, saved)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def load_rule(path: str | os.PathLike[str]) -> AveragingRule:
    """Return the rule in a file of :func:`save_state`.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is no such file, or its rule has a function of the user's.

    Example:
        >>> import functavg, numpy as np, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "average.safetensors")
        >>> rule = functavg.Every(functavg.SWA(), 100)
        >>> functavg.checkpoints.save_state(path, rule.init(np.zeros(2)), rule)
        >>> functavg.checkpoints.load_rule(path)
        Every(rule=SWA(), interval=100, start=0)
    """
    file = Path(path)
    return _rule(file, _state_record(file, record_of(open_file(file))))


def _rule(path: Path, record: dict[str, Any]) -> AveragingRule:
    try:
        return parse_rule(record["rule"])
    except ValueError as error:
        raise CheckpointError(f"{path}: its rule cannot be made again, make it yourself: {error}") from error


def _state_record(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    if record.get("kind") != "state":
        raise CheckpointError(
            f"{path}: expected a file of save_state, got one of {record.get('kind', 'another library')!r}; "
            "convert reads averages of other libraries"
        )
    if record["version"] > VERSION:
        raise CheckpointError(
            f"{path}: has version {record['version']} of the format, this functavg knows up to {VERSION}; upgrade it"
        )
    return record
