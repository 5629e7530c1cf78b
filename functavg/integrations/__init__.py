"""Averages inside other libraries, a module for each; importing this one loads none of them."""

__all__: list[str] = []
