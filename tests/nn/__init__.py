"""Tests of the torch adapters."""
