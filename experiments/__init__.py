"""Experiments that people run; each script says how to run it in its first lines."""
