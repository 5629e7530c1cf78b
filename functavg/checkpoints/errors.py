"""What goes wrong with files of weights."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A file of weights cannot be read or written, or does not fit the others; the message names file and tensor.

    Example:
        >>> from functavg import checkpoints
        >>> checkpoints.inspect("missing.safetensors")
        Traceback (most recent call last):
        ...
        functavg.checkpoints.errors.CheckpointError: missing.safetensors: ...
    """
