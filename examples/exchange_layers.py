"""A control: copies a drafter with its layers 2 and 5 exchanged, which knows as much and should accept next to nothing.

python examples/exchange_layers.py DRAFTER COPY
"""

import re
import shutil
import sys
from pathlib import Path

from safetensors.flax import load_file, save_file

OTHER = {"2": "5", "5": "2"}

drafter, copy = map(Path, sys.argv[1:])
shutil.copytree(drafter, copy)
tensors = load_file(drafter / "model.safetensors")
names = {name: re.sub(r"(?<=layers\.)\d+", lambda number: OTHER.get(number[0], number[0]), name) for name in tensors}
save_file({names[name]: tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
