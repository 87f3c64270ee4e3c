"""Attention kernels: the jnp reference, and the Pallas kernels that are tested against it."""
