"""What a run says on a terminal: its plan, its progress, its end."""
