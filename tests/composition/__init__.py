"""Combinators and windows: rules made of rules."""
