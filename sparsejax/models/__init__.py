"""Flax NNX modules, from the FFN to the transformer."""
