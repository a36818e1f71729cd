"""The parts of the main job: its flags, its plan, what it prints, its processes."""
