"""Checkpoint formats: safetensors folders, GGUF files and this project's own Orbax folders.

Every format ends as named `StoredTensor`s or as parameters under the decoder's own paths; `mapping`
holds the tables that connect the two.
"""
