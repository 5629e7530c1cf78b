"""Rules: one formula a class."""
