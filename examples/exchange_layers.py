"""A control: copies a drafter with its layers 2 and 5 exchanged. The same weights in a wrong order: hardly a token that
it drafts should be accepted.

python examples/exchange_layers.py DRAFTER COPY
"""

import re
import shutil
import sys
from pathlib import Path

from safetensors.flax import load_file, save_file

OTHER = {"2": "5", "5": "2"}

drafter, copy = map(Path, sys.argv[1:])
tensors = load_file(drafter / "model.safetensors")
for layer in OTHER:
    if not any(f"layers.{layer}." in name for name in tensors):
        sys.exit(f"{drafter}: has no layer {layer} to exchange")
shutil.copytree(drafter, copy)
names = {name: re.sub(r"(?<=layers\.)\d+", lambda number: OTHER.get(number[0], number[0]), name) for name in tensors}
save_file({names[name]: tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
