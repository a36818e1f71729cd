"""Comparisons of runs: their files, tables and processes, and what models can do."""
