"""Training of drafters: block-diffusion adaptation and alignment to a target."""
