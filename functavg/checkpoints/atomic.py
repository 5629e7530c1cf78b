"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

__all__: list[str] = []

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from functavg.checkpoints.errors import CheckpointError


@contextlib.contextmanager
def replacing(path: Path, size: int) -> Iterator[BinaryIO]:
    """Give a new file to write to; when the block ends well, it is on disk and takes the place of ``path``.

    The file lies beside ``path`` until then, so that taking its place is one step of the file system. Whatever is
    raised inside, it is removed. A process that is killed leaves it behind, and ``path`` as it was.

    Args:
        path: what to replace; a link is followed.
        size: about how many bytes will be written, to fail before the work where they cannot fit.

    Raises:
        CheckpointError: the file cannot be made, or its disk is full.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise CheckpointError(f"{path}: the output is a folder; name a file")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:  # from before the file is there, as an interrupt may come at any moment
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{size} bytes are to be written, {free} are free")
        with open(temporary, "x+b", buffering=0) as file:
            yield file  # unbuffered: a call need not take all bytes
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def write_back(file: BinaryIO) -> None:
    """Have the system begin to bring to disk what was written, so that the end does not wait for all of it."""
    if hasattr(os, "posix_fadvise"):  # Linux begins with what leaves its cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Make the new name of a file last; Windows has no way to, and needs none."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written: {error.strerror or error}; it is as it was before")
