"""Clusters of neurons, and which of them a token uses."""
