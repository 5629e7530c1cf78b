"""What a process does until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from functavg import checkpoints
from functavg.checkpoints import pieces


def average_forever(inputs: list[Path], output: Path, connection: Connection) -> None:
    """Average two files with one weight after the other; tell when the first output is there."""
    pieces.PIECE = 64  # many writes a file, so that most kills come in the middle of one
    weight = 0
    while True:
        weight = (weight + 1) % 8
        checkpoints.average(inputs, output, weights=[7 - weight, weight])
        connection.send(weight)
