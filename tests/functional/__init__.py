"""Tests of the functional core: states, trees, plans, kernels and rules."""
