"""The operands of an FFN's six GEMMs: weights, activations, rows of experts."""
