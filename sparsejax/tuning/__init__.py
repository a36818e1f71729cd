"""Timing the GEMMs that a run needs, before it starts."""
