"""Training of drafters: adaptation by block diffusion, and alignment to a target's hidden states."""
