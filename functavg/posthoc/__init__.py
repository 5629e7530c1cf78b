"""Averages after training: of checkpoints, of snapshots of other averages, and of models."""

from functavg.posthoc.combining import combine as combine
from functavg.posthoc.merging import merge_coefficients as merge_coefficients
from functavg.posthoc.soups import greedy_soup as greedy_soup
from functavg.posthoc.synthesis import Synthesis as Synthesis
from functavg.posthoc.synthesis import solve as solve
