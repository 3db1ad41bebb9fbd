"""Measurements behind docs/benchmarks.md. Nothing imports this; programs only."""
