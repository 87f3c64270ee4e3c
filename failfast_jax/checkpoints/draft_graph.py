"""The draft graph of `dllm --spiffy` (see `decoding.draft_states`): a JSON file beside the model, calibrated once.

    {"block_size": 32, "small_block_size": 8, "threshold": 1.0, "states": [[[0, 0]], [[0, 0], [1, 0]], ...], ...}

A state is a list of pairs: the position that is the i-th most confident of those masked takes its j-th best token. They
come in the order of their worth, so that the first D are the graph for `--spiffy D`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.errors import CheckpointError, OptionError
from failfast_jax.util import values
from failfast_jax.util.files import read_json, write_atomically

FILE = "spiffy.json"
COMMAND = "python -m failfast_jax.train spiffy"
"""The command that writes it."""

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class DraftGraph:
    """Draft states in the order of their worth.

    Attributes:
      block_size, small_block_size: sizes of the blocks that it was calibrated on.
      pair_sets: per state its pairs (position rank, token rank).
      about: further keys of the file, such as the threshold.
      where: the file, for messages.
    """

    block_size: int
    small_block_size: int
    pair_sets: tuple[Pairs, ...]
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = "the draft graph"

    def states(self, count: int, block: int, small_block: int) -> np.ndarray:
        """The `count` best states `[count, small_block]`: by position the rank of its token, or -1.

        OptionError: there are fewer, or they are for blocks of another size.
        """
        sizes, problem = (self.block_size, self.small_block_size), f"has {len(self.pair_sets)} states"
        if sizes != (block, small_block):
            problem = f"is for blocks of {sizes[0]} in parts of {sizes[1]}, not for {block} in parts of {small_block}"
        if sizes != (block, small_block) or count > len(self.pair_sets):
            raise OptionError(f"--spiffy {count}: {self.where} {problem}: calibrate again with {COMMAND}")
        states = np.full((count, small_block), -1, np.int32)
        for row, pairs in enumerate(self.pair_sets[:count]):
            for position, token in pairs:
                states[row, position] = token
        return states

    def save(self, path: Path) -> None:
        """Writes the graph as JSON, a line for each state."""
        sizes = {"block_size": self.block_size, "small_block_size": self.small_block_size}
        lines = ",\n".join(f"  {json.dumps(pairs)}" for pairs in self.pair_sets)
        head = json.dumps({**sizes, **self.about}, indent=1)[:-2]
        write_atomically(path, f'{head},\n "states": [\n{lines}\n ]\n}}\n')


def default_file(model: str | os.PathLike) -> Path | None:
    """The place beside a model's folder or file; None for a model that was built in memory."""
    try:
        path = resolve_source(model)
    except CheckpointError:
        return None
    return (path if path.is_dir() else path.parent) / FILE


def read(path: str | os.PathLike | None, model: str, ranks: int) -> DraftGraph:
    """Reads a draft graph of `ranks` known tokens per position; `path` is None for a model that has no place for one.

    Raises:
      OptionError: there is no such file.
      ConfigError: it is no draft graph; the key is named.
    """
    if path is None or not Path(path).is_file():
        place = "" if path is None else f" in {path}"
        flags = f"--target {model} --data ... --out FILE"
        raise OptionError(f"--spiffy: no calibrated draft graph{place}; make one with {COMMAND} {flags}")
    raw = read_json(Path(path))
    block, small = (values.number(raw, key, path, most=2**16) for key in ("block_size", "small_block_size"))
    states = raw.get("states")
    if not isinstance(states, list) or not all(_is_state(state, small, ranks) for state in states):
        rule = (
            f"must be a list of states, each of pairs of a position's rank below {small} and a token's rank below "
            f"{ranks}, no position twice"
        )
        raise values.refusal(raw, "states", path, rule)
    about = {key: raw[key] for key in raw.keys() - {"block_size", "small_block_size", "states"}}
    return DraftGraph(block, small, tuple(tuple(map(tuple, state)) for state in states), about, str(path))


def _is_state(state: Any, positions: int, ranks: int) -> bool:
    if not isinstance(state, list) or not state or not all(isinstance(p, list) and len(p) == 2 for p in state):
        return False
    is_below = all(values.is_number(n, int, 0, most - 1) for pair in state for n, most in zip(pair, (positions, ranks)))
    return is_below and len({position for position, _ in state}) == len(state)
