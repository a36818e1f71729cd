"""The mesh of a run, and the processes that share it."""
