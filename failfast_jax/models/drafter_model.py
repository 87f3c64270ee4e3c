AUTOREGRESSIVE, BLOCK_DIFFUSION, CONDITIONED = "autoregressive", "block-diffusion", "conditioned"
