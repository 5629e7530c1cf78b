"""Averages of checkpoints on disk, a few MiB at a time."""

from functavg.checkpoints.averaging import average as average
from functavg.checkpoints.converting import convert as convert
from functavg.checkpoints.errors import CheckpointError as CheckpointError
from functavg.checkpoints.expressions import parse_rule as parse_rule
from functavg.checkpoints.inspecting import Holding as Holding
from functavg.checkpoints.inspecting import Inspection as Inspection
from functavg.checkpoints.inspecting import inspect as inspect
from functavg.checkpoints.soups import greedy_soup as greedy_soup
from functavg.checkpoints.states import load_rule as load_rule
from functavg.checkpoints.states import load_state as load_state
from functavg.checkpoints.states import save_state as save_state
from functavg.checkpoints.steps import profile_weights as profile_weights
from functavg.checkpoints.steps import sort_by_step as sort_by_step
from functavg.checkpoints.steps import step_of as step_of
from functavg.checkpoints.storing import save_weights as save_weights
from functavg.checkpoints.summing import Averaged as Averaged
from functavg.checkpoints.synthesis import Snapshot as Snapshot
from functavg.checkpoints.synthesis import posthoc as posthoc
