"""The parts of a run: its phases, its step, its loop and its records."""
