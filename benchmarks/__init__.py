"""Measurements whose results stand in the README, each a module to run with ``python -m benchmarks.NAME``."""
