"""Averages of checkpoints on disk, one tensor at a time."""

from functavg.checkpoints.averaging import Averaged as Averaged
from functavg.checkpoints.averaging import average as average
from functavg.checkpoints.converting import convert as convert
from functavg.checkpoints.errors import CheckpointError as CheckpointError
from functavg.checkpoints.expressions import parse_rule as parse_rule
from functavg.checkpoints.opening import open_weights as open_weights
from functavg.checkpoints.states import load_rule as load_rule
from functavg.checkpoints.states import load_state as load_state
from functavg.checkpoints.states import save_state as save_state
