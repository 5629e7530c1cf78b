"""Reading models that are saved in several files with an index."""

from __future__ import annotations

__all__: list[str] = []

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.readers import Reader, some
from functavg.checkpoints.tensors import Piece, reading


class ShardedReader(Reader):
    """A :class:`Reader` of the files that an index names: ``{"weight_map": {tensor: file}, "metadata": {...}}``."""

    def __init__(self, path: Path, open_file: Callable[[Path], Reader]) -> None:
        weight_map = _weight_map(path)
        shards = {file: open_file(path.parent / file) for file in dict.fromkeys(weight_map.values())}
        self._readers: dict[str, Reader] = {name: shards[file] for name, file in weight_map.items()}
        for name, reader in self._readers.items():
            if name not in reader.infos:
                raise CheckpointError(f"{reader.path}: {name!r} is missing, the index {path} says it is there")
        for reader in shards.values():
            if extra := [name for name in reader.infos if name not in weight_map and name not in reader.ties]:
                raise CheckpointError(f"{reader.path}: unexpected {some(extra)}, which the index {path} does not name")
        super().__init__(
            path,
            (path, *(file for reader in shards.values() for file in reader.files)),
            {name: reader.infos[name] for name, reader in self._readers.items()},
            {name: first for reader in shards.values() for name, first in reader.ties.items()},
            metadata={key: value for reader in shards.values() for key, value in reader.metadata.items()},
        )

    def read_piece(self, piece: Piece, out: Tensor, /) -> Tensor:
        return self._readers[piece.name].read_piece(piece, out)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        with reading(path):
            weight_map = json.loads(path.read_bytes())["weight_map"]
        if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map must name files")
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: corrupt: no index of shards ({error!r})") from error
    if outside := [file for file in weight_map.values() if Path(file).name != file]:
        raise CheckpointError(f"{path}: expected the names of files beside the index, got {some(outside)}")
    found: dict[str, str] = weight_map
    return found
