"""Averages of checkpoints on disk, one tensor at a time."""

from functavg.checkpoints.averaging import Averaged as Averaged
from functavg.checkpoints.averaging import average as average
from functavg.checkpoints.errors import CheckpointError as CheckpointError
from functavg.checkpoints.opening import open_weights as open_weights
