"""LiT training with heteroscedastic heads in JAX."""
