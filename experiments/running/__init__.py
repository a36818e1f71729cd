"""What the main job is made of: its flags, its plan, what it prints, its processes."""
