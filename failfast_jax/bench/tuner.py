"""The phases of tuning a pair: answers, recorded drafts, costs, predictions, and the best of them timed for real."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from failfast_jax.bench import grid, round_costs
from failfast_jax.bench.grid import Candidate, Grid, Setting, chunk_key
from failfast_jax.bench.predict import Costs, Prediction, Recordings, predict, rounds_of
from failfast_jax.bench.recorded import Drafts, KnownAnswer, Recorder, Recording
from failfast_jax.checkpoints.tuned import model_key
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.engine import FailFast, Result
from failfast_jax.files import Journal, write_atomically
from failfast_jax.platforms import machine

RECORDS = "records.jsonl"
VANILLA, LOOKUP = "vanilla", "lookup"
"""What every timed setting is compared with: plain decoding, and what needs no drafter."""
BLOCK = 4
"""Settings that are timed in turn with one another: so many have their programs in memory at once."""
WARM_UPS = 3
ACCELERATOR_BATCH = 8
"""Answers that are followed together where that costs no more than one."""


class OutOfTime(Exception):
    """The time that was given is over; what is done is kept."""


class Records:
    """What a run found out, by kind and key, on disk as it comes; see `files.Journal`.

    Args:
      deadline: of `time.monotonic`, behind which nothing new is begun.
    """

    def __init__(self, path: Path, identity: dict[str, Any], deadline: float | None = None):
        self.journal, self.deadline = Journal(path, identity), deadline
        self.values = {(record["kind"], record["key"]): record["value"] for record in self.journal.records}

    def add(self, kind: str, key: str, value: Any) -> None:
        """Keeps a value; it is on disk when this returns."""
        self.values[kind, key] = value
        self.journal.append({"kind": kind, "key": key, "value": value})

    def get(self, kind: str, key: str) -> Any:
        return self.values.get((kind, key))

    def check_time(self) -> None:
        """Raises OutOfTime behind the deadline."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime

    def seconds(self, phases: Iterable[str]) -> float:
        """Time spent on phases, all sessions together."""
        return sum(v["seconds"] for (kind, _), v in self.values.items() if kind == "phase" and v["phase"] in phases)

    @contextlib.contextmanager
    def phase(self, name: str, total: int, unit: str, shown: str | None = None) -> Iterator[tqdm]:
        """Keeps the time that the work inside takes, under a bar."""
        start = time.perf_counter()
        try:
            with tqdm(total=total, desc=shown or name, unit=unit, file=sys.stderr) as bar:
                yield bar
        finally:  # of a phase that was interrupted, too
            number = sum(kind == "phase" for kind, _ in self.values)
            self.add("phase", str(number), {"phase": name, "seconds": time.perf_counter() - start})


# -- timed for real ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to answer that is timed."""

    label: str
    engine: FailFast
    config: GenerationConfig


def warm_answer(engine: FailFast, prompt: list[int], config: GenerationConfig) -> Result:
    """An answer that neither compiled a program nor read one from the cache."""
    for _ in range(WARM_UPS):
        result = engine.generate([prompt], config)[0]
        if not result.stats.compiles + result.stats.cache_hits:
            break
    return result


def _answered(prompt: list[int], contenders: Sequence[Contender]) -> dict[str, Any]:
    """Every contender's answer to a prompt, in that order; `equal`: to that of plain decoding."""
    found, outputs = {}, {}
    for one in contenders:
        result = warm_answer(one.engine, prompt, one.config)
        stats, outputs[one.label] = result.stats, result.output_ids
        found[one.label] = {
            "decode_s": stats.decode_s,
            "tokens": len(result.output_ids),
            "rounds": stats.rounds,
            "drafter_passes": stats.drafter_passes,
        }
    for label, record in found.items():
        record["equal"] = outputs[label] == outputs[VANILLA]
    return found


def race(
    records: Records, phase: str, contenders: Sequence[Contender], prompts: Sequence[list[int]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Contenders timed for real, in blocks, prompt by prompt back to back with `vanilla` and `lookup`.

    Returns:
      What was measured, by label; `lookup` is among them.
    """
    engine, tokens = contenders[0].engine, contenders[0].config.max_new_tokens
    plain = [
        Contender(name, engine, GenerationConfig(method=name, max_new_tokens=tokens)) for name in (VANILLA, LOOKUP)
    ]
    blocks = [[*plain, *contenders[at : at + BLOCK]] for at in range(0, len(contenders), BLOCK)]
    # Prompts that need the same programs come together.
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    turns = [(block, repeat, number) for block in blocks for repeat in range(repeats) for number in order]
    rows: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    with records.phase(phase, len(turns), "turn", f"{phase}, for real") as bar:
        for position, (block, repeat, number) in enumerate(turns):
            key = json.dumps([phase, [one.label for one in block], repeat, number])
            if records.get("turn", key) is None:
                records.check_time()
                records.add("turn", key, _answered(prompts[number], block[:: -1 if position % 2 else 1]))
            found = records.get("turn", key)
            for one in block[1:]:
                rows.setdefault(one.label, []).append((found[one.label], found[VANILLA]))
            bar.update()
    return {label: _measured(own, repeats) for label, own in rows.items()}


def _measured(rows: Sequence[tuple[dict[str, Any], dict[str, Any]]], repeats: int) -> dict[str, Any]:
    """Sums over a contender's answers, each beside that of plain decoding."""
    own, plain = (sum(row[side]["decode_s"] for row in rows) for side in (0, 1))
    repeats = max(repeats, 1)
    return {
        "measured_speedup": plain / own,
        "measured_s": own / repeats,
        "vanilla_s": plain / repeats,
        "measured_rounds": sum(row["rounds"] for row, _ in rows) // repeats,
        "measured_passes": sum(row["drafter_passes"] for row, _ in rows) // repeats,
        "answers_equal_to_vanilla": f"{sum(row['equal'] for row, _ in rows)} of {len(rows)}",
    }


# -- the phases --------------------------------------------------------------------------------------------


def _read_drafts(path: Path) -> dict[str, Drafts]:
    """Recorded drafts of an answer, by the label of their recording."""
    if not path.exists():
        return {}
    with np.load(path) as stored:
        labels = dict.fromkeys(name.rpartition("/")[0] for name in stored.files)
        fields = [field.name for field in dataclasses.fields(Drafts)]
        return {label: Drafts(**{field: stored[f"{label}/{field}"] for field in fields}) for label in labels}


def _write_drafts(path: Path, found: Mapping[str, Drafts]) -> None:
    arrays = {f"{label}/{field}": value for label, one in found.items() for field, value in vars(one).items()}
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, packed.getvalue())


class Tuner:
    """Tunes one pair; each phase continues from what `records` holds.

    Raises:
      ValueError: a grid without a setting that the drafter can serve, or a prompt that leaves no room for its answer.
    """

    def __init__(
        self,
        engine: FailFast,
        prompts: Sequence[list[int]],
        values: Grid,
        tokens: int,
        out: Path,
        deadline: float | None = None,
    ):
        self.engine, self.prompts, self.tokens, self.out = engine, [list(p) for p in prompts], tokens, out
        self.settings = values.settings()
        self.candidates = grid.candidates(engine, self.settings)
        self.floor = min(setting.tau for setting in self.settings)
        longest = self.longest().drafter.max_draft
        for number, prompt in enumerate(self.prompts):
            if len(prompt) + tokens + longest + 1 > engine.max_seq_len:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens: with --max-new-tokens {tokens} and a draft of "
                    f"{longest} it exceeds the {engine.max_seq_len} tokens there is room for"
                )
        self.machine = {**machine(), "platform": engine.platform}
        identity = {
            "target": model_key(engine.target),
            "drafter": model_key(engine.drafter),
            "dtype": str(np.dtype(engine.target.dtype)),
            "prompts": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
            "max_new_tokens": tokens,
            "machine": {key: self.machine[key] for key in ("platform", "device", "processor", "cores", "jax")},
        }
        self.records = Records(out / RECORDS, identity, deadline)

    def longest(self) -> Candidate:
        return max(self.candidates, key=lambda candidate: candidate.drafter.max_draft)

    # 1
    def answers(self) -> list[KnownAnswer]:
        """The target's own answers."""
        config = GenerationConfig(method=VANILLA, max_new_tokens=self.tokens)
        found = []
        with self.records.phase("answers", len(self.prompts), "prompt", "vanilla answers") as bar:
            for number, prompt in enumerate(self.prompts):
                if self.records.get("answer", str(number)) is None:
                    self.records.check_time()
                    self.records.add("answer", str(number), self.engine.generate([prompt], config)[0].output_ids)
                found.append(KnownAnswer(tuple(prompt), tuple(self.records.get("answer", str(number)))))
                bar.update()
        return found

    def recorder(self, answers: Sequence[KnownAnswer]) -> Recorder:
        batch = 1 if self.engine.platform == "cpu" else ACCELERATOR_BATCH
        return Recorder(self.engine, answers, [c.drafter for c in self.candidates], batch=batch)

    def needed(self) -> dict[Any, Recording]:
        """Recordings that all candidates need: by (chunk key, begun), or by setting where one serves only that one."""
        out: dict[Any, Recording] = {}
        longest: dict[int, int] = {}
        begun: dict[int, set[int]] = {}
        for candidate in self.candidates:
            setting, drafter = candidate.setting, candidate.drafter
            if setting.schedule == "aligned":
                out[setting] = Recording(drafter, setting.tau, every=False)
                continue
            model = drafter.model if isinstance(drafter, Hybrid) else drafter
            # A recording of longer drafts serves shorter ones.
            longest[setting.spec_len] = max(longest.get(setting.spec_len, 0), model.max_draft)
            begun.setdefault(setting.spec_len, set()).update(grid.begun_lengths(drafter))
        for spec_len, lengths in sorted(begun.items()):
            drafter = Setting("wide", spec_len, self.floor, longest[spec_len]).build(self.engine)
            for length in sorted(lengths):
                out[chunk_key("wide", spec_len), length] = Recording(drafter, self.floor, begun=length)
        return out

    # 2
    def recordings(self, recorder: Recorder) -> Recordings:
        """Drafts along all answers."""
        needed, count = self.needed(), len(recorder.answers)
        paths = [self.out / "drafts" / f"{index:05d}.npz" for index in range(count)]
        found = [_read_drafts(path) for path in paths]
        with self.records.phase("drafts", count * len(needed), "recording") as bar:
            for group in recorder.groups():
                for recording in needed.values():
                    if any(recording.label not in found[index] for index in group):
                        self.records.check_time()
                        for index, drafts in zip(group, recorder.record(group, recording)):
                            found[index][recording.label] = drafts
                    bar.update(len(group))
                for index in group:
                    _write_drafts(paths[index], found[index])
        drafts, rounds = {}, {}
        for key, recording in needed.items():
            own = [found[index][recording.label] for index in range(count)]
            if isinstance(key, Setting):
                rounds[key] = [rounds_of(one, text) for one, text in zip(own, recorder.answers)]
            else:
                drafts[key] = own
        return Recordings(recorder.answers, drafts, recorder.matches(), rounds)

    # 3
    def costs(self, recorder: Recorder, repeats: int) -> Costs:
        """Seconds of each part of a round."""
        widths = sorted({width for candidate in self.candidates for width in candidate.widths})
        drafters = {}
        for key, recording in self.needed().items():
            chunk = key[0] if isinstance(key, tuple) else chunk_key(key.schedule, key.spec_len)
            drafters.setdefault(chunk, recording.drafter)
        key = json.dumps([widths, sorted(drafters), repeats])
        stored = self.records.get("costs", key)
        if stored is None:
            self.records.check_time()
            lookup = next((c.drafter.lookup for c in self.candidates if isinstance(c.drafter, Hybrid)), Lookup())
            with self.records.phase("costs", len(widths) + len(drafters) + 2, "part") as bar:
                longest = self.longest().drafter
                stored = round_costs.part_costs(recorder, drafters, longest, widths, lookup, repeats, bar.update)
            self.records.add("costs", key, stored)
        return Costs(
            vanilla=stored["vanilla"],
            verify={int(width): seconds for width, seconds in stored["verify"].items()},
            drafts={chunk: tuple(pair) for chunk, pair in stored["drafts"].items()},
            lookup=stored["lookup"],
        )

    # 4
    def predictions(self, recordings: Recordings, costs: Costs) -> list[Prediction]:
        """All settings that differ, the fastest first."""
        out = []
        with self.records.phase("predict", len(self.candidates), "setting", "settings") as bar:
            for candidate in self.candidates:
                out.append(predict(recordings, candidate.setting, candidate.drafter, candidate.widths, costs))
                bar.update()
        return sorted(out, key=lambda prediction: -prediction.speedup)

    # 5
    def contender(self, setting: Setting) -> Contender:
        config = GenerationConfig(method="failfast", max_new_tokens=self.tokens, **setting.options())
        return Contender(setting.label, self.engine, config)

    def measure(self, phase: str, settings: Sequence[Setting], repeats: int) -> dict[str, dict[str, Any]]:
        """Settings timed for real; see `race`."""
        return race(self.records, phase, [self.contender(s) for s in settings], self.prompts, repeats)
