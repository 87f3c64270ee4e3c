"""The decoder, its attention rules and its KV cache. Nothing here knows about decoding methods."""
