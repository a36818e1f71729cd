"""The feed-forward network: its plan, its six GEMMs and their gradients."""
