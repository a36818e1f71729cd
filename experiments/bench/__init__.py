"""Benchmarks that people run, and the modules that only they use."""
