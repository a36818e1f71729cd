"""The timing of the GEMMs that a run needs, before the run starts."""
