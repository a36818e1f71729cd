"""Settings of every test: strict ranks, no accidental GPU."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
