"""Opening whatever holds weights on disk."""

from __future__ import annotations

import os
from pathlib import Path

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.readers import Reader, Selected
from functavg.checkpoints.records import record_of
from functavg.checkpoints.safetensors_reader import SafetensorsReader
from functavg.checkpoints.sharded_reader import ShardedReader
from functavg.checkpoints.tensors import reading
from functavg.checkpoints.torch_reader import TorchReader

INDEX = ".index.json"

_STEMS = {
    ".safetensors": ("model", "diffusion_pytorch_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model"),
}
# What a folder of transformers or diffusers holds its weights in, the first that is there.
_IN_FOLDERS = [f"{stem}{suffix}{index}" for suffix, stems in _STEMS.items() for index in ("", INDEX) for stem in stems]


def open_weights(path: str | os.PathLike[str], key: str | None = None) -> Reader:
    """Return a reader of the weights in a file or folder; no tensor is read yet.

    Args:
        path: a safetensors file, a file of ``torch.save``, the index of either's shards, or a folder that holds one of
            them under the names of transformers or diffusers. The content decides, not the name. Of a file of
            :func:`save_state`, the weights are the average.
        key: where in the file the weights are: keys of nested dicts, or what names begin with, joined by dots.

    Raises:
        CheckpointError: it is none of them, or not whole.
    """
    file = weights_file(Path(path))
    if is_index(file):
        sharded = open_file(file)
        return sharded if key is None else Selected(sharded, key)
    torch_file = is_torch(file)
    reader = TorchReader(file, key) if torch_file else SafetensorsReader(file)
    prefix = [part for part in (state_prefix(reader), None if torch_file else key) if part]
    return Selected(reader, ".".join(prefix)) if prefix else reader


def open_file(path: Path) -> Reader:
    """Return a reader of all tensors in one file, or in the shards of an index, by the names that they have there."""
    if is_index(path):
        return ShardedReader(path, open_file)
    return TorchReader(path, None) if is_torch(path) else SafetensorsReader(path)


def state_prefix(reader: Reader) -> str | None:
    """Return what the names of the average begin with in a file of ``save_state``, None elsewhere."""
    return "average" if record_of(reader).get("kind") == "state" else None


def weights_file(path: Path) -> Path:
    """Return the file of weights in a folder, and a file as it is."""
    if not path.is_dir():
        return path
    found = next((path / name for name in _IN_FOLDERS if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{path}: the folder holds none of {', '.join(_IN_FOLDERS)}; name a file")
    return found


def is_index(path: Path) -> bool:
    """Tell the index of shards by its name."""
    return path.name.endswith(INDEX)


def is_torch(path: Path) -> bool:
    """Tell a file of ``torch.save``, a zip file or a pickle, from one of safetensors.

    Raises:
        CheckpointError: it begins as neither does.
    """
    with reading(path), open(path, "rb") as file:
        start = file.read(9)
    if start[4:] == b"\0\0\0\0{":  # a length below 2^32, then JSON
        return False
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        return True
    if path.suffix == ".safetensors":  # what is wrong with it, its reader will tell
        return False
    raise CheckpointError(f"{path}: expected a file of safetensors or of torch.save, it begins with {start!r}")
