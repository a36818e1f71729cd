"""Benchmarks that people run, and what only they use."""
