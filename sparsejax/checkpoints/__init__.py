"""Checkpoints that a killed process cannot damage."""
