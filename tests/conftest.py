"""Settings of every test: strict ranks, no accidental GPU."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# On a GPU float32 GEMMs would otherwise round their operands to TF32.
jax.config.update("jax_default_matmul_precision", "highest")
