"""What a switch between two phases does to a model and its optimiser."""
