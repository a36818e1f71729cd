"""Pallas kernels for GPUs, and the tuning of their configs."""
