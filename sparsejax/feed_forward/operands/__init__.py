"""What the six GEMMs of an FFN read: weights, activations, rows of experts."""
