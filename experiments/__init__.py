"""Experiments that people run; each script says how in its first lines."""
