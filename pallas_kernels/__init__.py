"""Pallas GPU kernels."""
