"""The tuner's search: settings answer prompts by the clock, and the faster half goes on to more prompts.

It begins with a coarse grid and goes on with the neighbours of the best, until none of them is faster.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax import distributed
from failfast_jax.bench import grid as grids
from failfast_jax.bench.datasets import stamp
from failfast_jax.bench.grid import Grid, Setting
from failfast_jax.bench.harness import answer
from failfast_jax.checkpoints.tuned import MACHINE, model_key
from failfast_jax.command import OutOfTime
from failfast_jax.config import GenerationConfig
from failfast_jax.engine import FailFast
from failfast_jax.files import Journal, Record
from failfast_jax.platforms import machine
from failfast_jax.progress import progress_bar

RECORDS = "records.jsonl"
TURN = "timed turn"
"""Kind of a record: a prompt answered by several settings, one after the other."""
SEARCH, VERIFY = "search", "verify"
VANILLA, LOOKUP = "vanilla", "lookup"
"""What settings are compared with: plain decoding, and what needs no drafter."""
BLOCK = 4
"""Settings that take turns with one another: so many have their programs in memory at once."""
FEWEST_PROMPTS = 2
"""With which the slower half of the settings is left out."""


class Tuner:
    """Searches for one pair's fastest setting. Everything is decided by what the journal holds, or is added to it.

    Args:
      prompts: token ids of each.
      tokens: most tokens of an answer.
      out: the folder of the journal.
      finalists: settings that are timed on all prompts, at least.
      deadline: of `time.monotonic`, behind which nothing new is begun.

    Attributes:
      settings: by label, those with common programs side by side.
      pairs: by phase and label, then by prompt: answers, each beside plain decoding's of the same turn.

    Raises:
      ValueError: a grid without a setting that the drafter can serve, or a prompt that leaves no room for its answer.
    """

    def __init__(
        self,
        engine: FailFast,
        prompts: Sequence[list[int]],
        grid: Grid,
        tokens: int,
        out: Path,
        finalists: int = 2,
        deadline: float = math.inf,
    ):
        self.engine, self.prompts, self.grid = engine, [list(prompt) for prompt in prompts], grid
        self.finalists, self.deadline = finalists, deadline
        self.settings: dict[str, Setting] = {s.label: s for s in grids.settings_of(grid, engine)}
        for number, prompt in enumerate(self.prompts):
            if len(prompt) + tokens > engine.max_seq_len:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens: with --max-new-tokens {tokens} it exceeds the "
                    f"{engine.max_seq_len} tokens there is room for"
                )
        self.configs = {name: GenerationConfig(method=name, max_new_tokens=tokens) for name in (VANILLA, LOOKUP)}
        for label, setting in self.settings.items():
            self.configs[label] = GenerationConfig(method="failfast", max_new_tokens=tokens, **setting.options())
        devices = 1 if engine.mesh is None else engine.mesh.size
        self.machine = {**machine(), "platform": engine.platform, "devices": devices}
        identity = {
            "target": model_key(engine.target),
            "drafter": model_key(engine.drafter),
            "dtype": str(np.dtype(engine.target.dtype)),
            "prompts": stamp(self.prompts),
            "max_new_tokens": tokens,
            "machine": {key: self.machine[key] for key in (*MACHINE, "jax")},
        }
        self.journal = Journal(out / RECORDS, identity)
        self.stored = {r["turn"]: r for r in self.journal.records if r["kind"] == TURN}
        self.pairs: dict[tuple[str, str], dict[int, list[tuple[Record, Record]]]] = {}

    # -- answers -------------------------------------------------------------------------------------------

    def turn(self, phase: str, repeat: int, number: int, labels: Sequence[str]) -> None:
        """A prompt answered by plain decoding and by settings, one after the other, unless it is on record."""
        name = json.dumps([phase, repeat, number, sorted(labels)])
        if name not in self.stored:
            if self.deadline < math.inf and distributed.agreed(time.monotonic() > self.deadline):
                raise OutOfTime
            begin, found, ids = time.perf_counter(), {}, {}
            for label in labels:
                result = answer(self.engine, self.prompts[number], self.configs[label])
                ids[label], stats = result.output_ids, result.stats
                counts = {"rounds": stats.rounds, "drafter_passes": stats.drafter_passes}
                found[label] = {"decode_s": stats.decode_s, "tokens": len(result.output_ids), **counts}
            for label, record in found.items():
                record["equal"] = ids[label] == ids[VANILLA]
            seconds = time.perf_counter() - begin
            # Process 0's clock: what is timed next depends on it.
            self.stored[name] = distributed.agreed({"kind": TURN, "turn": name, "seconds": seconds, "answers": found})
            self.journal.append(self.stored[name])
        answers = self.stored[name]["answers"]
        for label, own in answers.items():
            prompts = self.pairs.setdefault((phase, label), {})
            prompts.setdefault(number, []).append((own, answers[VANILLA]))

    def measure(
        self, labels: Sequence[str], prompts: int, *, best: str | None = None, phase: str = SEARCH, repeats: int = 1
    ) -> None:
        """Times settings that were not, in blocks, prompt by prompt beside plain decoding and the best so far.

        Args:
          prompts: number of the first prompts.
          repeats: timed answers a prompt.
        """
        blocks = [labels[at : at + BLOCK] for at in range(0, len(labels), BLOCK)]
        # Prompts that need the same programs come together.
        order = sorted(range(prompts), key=lambda number: len(self.prompts[number]))
        turns = [(block, repeat, number) for block in blocks for repeat in range(repeats) for number in order]
        said = f"{phase}: {len(labels)} settings, {prompts} prompts"
        for position, (block, repeat, number) in enumerate(progress_bar(said, "turn", turns)):
            timed = [len(self.pairs.get((phase, label), {}).get(number, ())) for label in block]
            missing = [label for label, times in zip(block, timed) if times <= repeat]
            if missing:
                beside = [VANILLA] if best is None or best in missing else [VANILLA, best]
                self.turn(phase, repeat, number, [*beside, *missing][:: -1 if position % 2 else 1])

    # -- what was measured ---------------------------------------------------------------------------------

    def speedup(self, label: str, prompts: Iterable[int], phase: str = SEARCH) -> float:
        """Over plain decoding: the median prompt's, of which the median turn's."""
        ratios = []
        for number in prompts:
            turns = self.pairs[phase, label][number]
            ratios.append(np.median([plain["decode_s"] / own["decode_s"] for own, plain in turns]))
        return float(np.median(ratios))

    def report(self, label: str, phase: str = SEARCH) -> dict[str, Any]:
        """What was measured of a setting."""
        pairs = self.pairs[phase, label]
        firsts = [turns[0][0] for turns in pairs.values()]
        equal = [own["equal"] for turns in pairs.values() for own, _ in turns]

        def seconds(side: int) -> float:
            return float(sum(np.median([turn[side]["decode_s"] for turn in turns]) for turns in pairs.values()))

        return {
            "measured_speedup": self.speedup(label, pairs, phase),
            "measured_prompts": len(pairs),
            "measured_s": seconds(0),
            "vanilla_s": seconds(1),
            "measured_tokens": sum(own["tokens"] for own in firsts),
            "measured_rounds": sum(own["rounds"] for own in firsts),
            "measured_passes": sum(own["drafter_passes"] for own in firsts),
            "answers_equal_to_vanilla": f"{sum(equal)} of {len(equal)}",
        }

    def seconds(self) -> float:
        """Time spent on turns, all sessions together."""
        return sum(record["seconds"] for record in self.journal.records if record["kind"] == TURN)

    # -- the search ----------------------------------------------------------------------------------------

    def halve(self, labels: Sequence[str], best: str | None) -> str:
        """The fastest setting: the faster half of them goes on to twice as many prompts, up to all."""
        prompts = min(FEWEST_PROMPTS, len(self.prompts))
        while True:
            self.measure(labels, prompts, best=best)
            ranked = sorted(labels, key=lambda label: -self.speedup(label, range(prompts)))
            if prompts == len(self.prompts):
                return ranked[0]
            best = ranked[0]
            kept = ranked[: max((len(ranked) + 1) // 2, self.finalists)]
            labels = [label for label in labels if label in kept]
            prompts = min(2 * prompts, len(self.prompts))

    def search(self, every: bool = False) -> list[str]:
        """Settings that were timed on all prompts, the fastest first.

        Args:
          every: whether to time every setting on every prompt in the end.
        """
        labels = [n for n, s in self.settings.items() if grids.is_coarse(s, self.grid)]
        best, tried = self.halve(labels, None), set(labels)
        while True:
            centre = self.settings[best]
            near = [n for n, s in self.settings.items() if grids.are_neighbours(s, centre, self.grid)]
            new = [label for label in near if label not in tried]
            if not new:
                break
            tried |= set(new)
            best = self.halve([best, *new], best)
        if every:
            self.measure(list(self.settings), len(self.prompts), best=best)
        done = [n for n in self.settings if len(self.pairs.get((SEARCH, n), {})) == len(self.prompts)]
        return sorted(done, key=lambda label: -self.speedup(label, range(len(self.prompts))))

    def verify(self, labels: Sequence[str], repeats: int) -> str:
        """The fastest of some settings, timed anew beside plain decoding and lookups."""
        self.measure([LOOKUP, *labels], len(self.prompts), phase=VERIFY, repeats=repeats)
        return max(labels, key=lambda label: self.speedup(label, range(len(self.prompts)), VERIFY))
