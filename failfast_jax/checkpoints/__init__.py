"""Models' files: safetensors folders, GGUF files, this project's own Orbax folders, and drafters' folders.

`model_folder.ModelFolder` opens any of them. Every format ends as named `StoredTensor`s or as parameters under the
decoder's own paths; `parameter_map` holds the tables that connect the two.
"""
