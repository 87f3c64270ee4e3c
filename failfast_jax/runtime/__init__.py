"""A compiled pair of models, and sessions that decode batches of token ids with it."""
