"""`python -m failfast_jax.bench.tune`: which decoding options are fastest for a pair on this machine?

1. `vanilla` answers the calibration prompts.
2. The drafter drafts at every position of these answers, once for each chunk length; nothing is verified.
3. Parts of a round are timed: verifies by width, drafter passes, lookups, a plain step.
4. Every setting is simulated round by round (`bench.simulate`), and its time predicted from the counts and the costs.
5. The best two (`--verify`) are timed for real, back to back with `vanilla`; the faster one goes to `tuned.json`, which
   `python -m failfast_jax.generate --settings` and `FailFast(..., settings=...)` read.

With `--full-sweep` settings are timed whatever was predicted for them: what the prediction has to be held against.
Everything is kept in `--out`, from which a killed run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from failfast_jax.bench import simulate
from failfast_jax.bench.datasets import read_prompts
from failfast_jax.bench.simulate import Answer, Costs, Lookups, Prediction, Replayed, Setting, chunk_key
from failfast_jax.bench.walks import NO_LIMIT, Request, Table, Text, Walker, long_enough
from failfast_jax.checkpoints.tuned import TunedOptions, model_key, read_settings, write_settings
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding import Drafter
from failfast_jax.defaults import load_pair
from failfast_jax.drafters.hybrid import Hybrid
from failfast_jax.drafters.lookup import Lookup
from failfast_jax.engine import FailFast, Result
from failfast_jax.errors import OptionError
from failfast_jax.platforms import machine

TUNED, SUMMARY, RECORDS = "tuned.json", "summary.json", "records.jsonl"
BLOCK = 4
"""Settings that are timed in turn with one another and `vanilla`: so many have their programs in memory at once."""
WARM_UPS = 3
ACCELERATOR_BATCH = 8
"""Answers that are walked along together where that costs no more than one."""


# -- the grid ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Grid:
    """Values that are combined; a `max_spec_len` of None leaves the cap to the method."""

    schedules: tuple[str, ...]
    spec_lens: tuple[int, ...]
    taus: tuple[float, ...]
    max_spec_lens: tuple[int | None, ...]
    lookup_mins: tuple[int, ...]
    min_gains: tuple[float, ...]

    def settings(self) -> list[Setting]:
        """All combinations that are options of the engine."""
        hybrids = [(n, gain) for n in self.lookup_mins for gain in (self.min_gains if n else (0.0,))]
        found = []
        for schedule, n, tau, longest in itertools.product(
            self.schedules, self.spec_lens, self.taus, _open_first(self.max_spec_lens)
        ):
            if longest is None or longest >= n:
                pairs = hybrids if schedule == "wide" else [(0, 0.0)] * (0 in self.lookup_mins)
                found += [Setting(schedule, n, tau, longest, *pair) for pair in pairs]
        return list(dict.fromkeys(found))


def _open_first(caps: Iterable[int | None]) -> list[int | None]:
    """Of settings that come to the same the one that leaves the cap open is kept."""
    return sorted(caps, key=lambda cap: (cap is not None, -(cap or 0)))


def default_grid(engine: FailFast) -> Grid:
    """Values worth trying for a drafter."""
    taus = (0.3, 0.45, 0.6, 0.75, 0.9)
    hybrids = {"lookup_mins": (0, 2, 3, 4), "min_gains": (0.0, 0.5, 1.0, 1.5)}
    if engine.drafter.kind == "conditioned":
        rows = engine.drafter.config.rows
        chunks = sorted({min(n, rows) for n in (2, 3, 4, 5, 7, 10, 15, rows)})
        caps = (None, *(n for n in (3, 5, 7, 10, 15) if n < rows))
        return Grid(("wide",), tuple(chunks), taus, caps, **hybrids)
    return Grid(("wide", "aligned"), (5, 8, 10, 15, 20), taus, (None, 20, 40), **hybrids)


GRID_FLAGS = {
    "schedules": ("--schedule", str),
    "spec_lens": ("--spec-len", int),
    "taus": ("--tau", float),
    "max_spec_lens": ("--max-spec-len", int),
    "lookup_mins": ("--lookup-min", int),
    "min_gains": ("--min-gain", float),
}


def parse_grid(args: argparse.Namespace, default: Grid) -> Grid:
    """The default grid with the lists that were given.

    Raises:
      ValueError: a value that its option does not take.
    """
    changed = {}
    for field, (flag, kind) in GRID_FLAGS.items():
        text = getattr(args, field)
        if text is None:
            continue
        values: list[Any] = []
        for word in filter(None, (word.strip() for word in text.split(","))):
            try:
                values.append(None if field == "max_spec_lens" and word.lower() == "none" else kind(word))
                GenerationConfig(**{flag[2:].replace("-", "_"): values[-1]}).validate()
            except OptionError:
                raise
            except ValueError:
                said = {int: "integers", float: "numbers"}[kind]
                raise ValueError(f"{flag} {text}: must be {said} separated by commas") from None
        if not values:
            raise ValueError(f"{flag} {text!r}: holds no value")
        changed[field] = tuple(dict.fromkeys(values))
    return dataclasses.replace(default, **changed)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting, the drafter that the engine builds for it, and its verify widths."""

    setting: Setting
    drafter: Drafter
    widths: tuple[int, ...]


def candidates(engine: FailFast, settings: Iterable[Setting]) -> list[Candidate]:
    """Settings that differ in what they do; of equal ones the first.

    Raises:
      OptionError: one that this drafter cannot serve.
    """
    out: dict[tuple, Candidate] = {}
    for setting in settings:
        drafter = engine.build_drafter(GenerationConfig(method="failfast", **setting.options()))
        key = simulate.behaviour(setting, drafter)
        if key not in out:
            out[key] = Candidate(setting, drafter, engine._plan(drafter, False, 1).widths)
    return list(out.values())


# -- records -----------------------------------------------------------------------------------------------


class Records:
    """Lines of a run by kind and key, on disk as they come.

    Raises:
      ValueError: the file is none of this command's, or was made with other models, prompts or lengths.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.lines: dict[tuple[str, str], Any] = {}
        if path.exists():
            self._read(identity)
        else:
            self.add("run", "identity", identity)

    def _read(self, identity: dict[str, Any]) -> None:
        whole = []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    record = json.loads(line)
                    self.lines[record["kind"], record["key"]] = record["value"]
                    whole.append(line)
            except (json.JSONDecodeError, KeyError, TypeError):
                if number != len(lines):
                    raise ValueError(f"{self.path}: line {number} is no record; name another --out") from None
                print(f"{self.path}: line {number} is cut off; what it held is done again", file=sys.stderr)
        found = self.lines.get(("run", "identity"))
        if found is None:
            if whole:
                raise ValueError(f"{self.path}: no records of this command; name another --out")
            self.path.unlink()
            self.add("run", "identity", identity)
            return
        wanted = json.loads(json.dumps(identity))
        if other := [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]:
            raise ValueError(f"{self.path}: made with other settings ({', '.join(other)}); name another --out")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
        temporary.replace(self.path)

    def add(self, kind: str, key: str, value: Any) -> None:
        """Keeps a value; it is on disk when this returns."""
        self.lines[kind, key] = value
        # One write call: a kill leaves the line whole, absent, or cut off at the end of the file.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps({"kind": kind, "key": key, "value": value}) + "\n").encode())
        finally:
            os.close(descriptor)

    def get(self, kind: str, key: str) -> Any:
        return self.lines.get((kind, key))

    def seconds(self, phases: Iterable[str]) -> float:
        """Time spent on phases, all sessions together."""
        return sum(v["seconds"] for (kind, _), v in self.lines.items() if kind == "phase" and v["phase"] in phases)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:  # of a phase that was interrupted, too
            number = sum(kind == "phase" for kind, _ in self.lines)
            self.add("phase", str(number), {"phase": name, "seconds": time.perf_counter() - start})


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


# -- the phases --------------------------------------------------------------------------------------------


def warm_answer(engine: FailFast, prompt: list[int], config: GenerationConfig) -> Result:
    """An answer that neither compiled a program nor read one from the cache."""
    for _ in range(WARM_UPS):
        result = engine.generate([prompt], config)[0]
        if not result.stats.compiles + result.stats.cache_hits:
            break
    return result


class Tuner:
    """The phases of a run; each continues from what `records` holds."""

    def __init__(self, engine: FailFast, prompts: Sequence[list[int]], grid: Grid, tokens: int, out: Path):
        self.engine, self.prompts, self.tokens, self.out = engine, [list(p) for p in prompts], tokens, out
        self.settings = grid.settings()
        self.candidates = candidates(engine, self.settings)
        if not self.candidates:
            raise ValueError("the grid is empty: no --max-spec-len is as long as a --spec-len")
        self.floor = min(setting.tau for setting in self.settings)
        longest = max(candidate.drafter.max_draft for candidate in self.candidates)
        for number, prompt in enumerate(self.prompts):
            if len(prompt) + tokens + longest + 1 > engine.max_seq_len:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens: with --max-new-tokens {tokens} and a draft of "
                    f"{longest} it exceeds the {engine.max_seq_len} tokens there is room for"
                )
        host = machine()
        self.machine = {**host, "platform": engine.platform}
        identity = {
            "target": model_key(engine.target),
            "drafter": model_key(engine.drafter),
            "dtype": str(np.dtype(engine.target.dtype)),
            "prompts": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
            "max_new_tokens": tokens,
            "machine": {key: self.machine[key] for key in ("platform", "device", "processor", "cores", "jax")},
        }
        out.mkdir(parents=True, exist_ok=True)
        self.records = Records(out / RECORDS, identity)

    def bar(self, total: int, what: str, unit: str) -> tqdm:
        return tqdm(total=total, desc=what, unit=unit, file=sys.stderr)

    # 1
    def answers(self) -> list[Text]:
        """The target's own answers."""
        config = GenerationConfig(method="vanilla", max_new_tokens=self.tokens)
        with self.records.phase("answers"), self.bar(len(self.prompts), "vanilla answers", "prompt") as bar:
            for number, prompt in enumerate(self.prompts):
                if self.records.get("answer", str(number)) is None:
                    self.records.add("answer", str(number), self.engine.generate([prompt], config)[0].output_ids)
                bar.update()
        found = (self.records.get("answer", str(number)) for number in range(len(self.prompts)))
        return [Text(tuple(prompt), tuple(answer)) for prompt, answer in zip(self.prompts, found)]

    def walker(self, texts: Sequence[Text]) -> Walker:
        batch = 1 if self.engine.platform == "cpu" else ACCELERATOR_BATCH
        return Walker(self.engine, texts, [c.drafter for c in self.candidates], batch=batch)

    def _build(self, setting: Setting) -> Drafter:
        return self.engine.build_drafter(GenerationConfig(method="failfast", **setting.options()))

    def requests(self) -> dict[Any, Request]:
        """Walks that all candidates need: by (chunk key, begun), or by setting where a walk serves only that one."""
        out: dict[Any, Request] = {}
        longest: dict[tuple, int] = {}
        for candidate in self.candidates:
            setting = candidate.setting
            if setting.schedule == "aligned":
                out[setting] = Request(candidate.drafter, every=False, own_rule=True)
                continue
            model = candidate.drafter.model if isinstance(candidate.drafter, Hybrid) else candidate.drafter
            for begun in simulate.begun_lengths(candidate.drafter):
                key = (setting.spec_len, begun)
                longest[key] = max(longest.get(key, 0), model.max_draft)
        for (spec_len, begun), most in sorted(longest.items()):
            # A table of longer drafts serves shorter ones.
            most = max(count for (n, _), count in longest.items() if n == spec_len)
            drafter = self._build(Setting("wide", spec_len, self.floor, most))
            out[chunk_key("wide", spec_len), begun] = Request(drafter, begun=begun)
        return out

    # 2
    def tables(self, texts: Sequence[Text], walker: Walker) -> list[Answer]:
        """Drafts along all answers."""
        requests = self.requests()
        found: list[dict[str, Table]] = [{} for _ in texts]
        fields = [field.name for field in dataclasses.fields(Table)]
        with self.records.phase("drafts"), self.bar(len(texts) * len(requests), "drafts", "walk") as bar:
            for group in walker.groups():
                for index in group:
                    path = self.out / "drafts" / f"{index:05d}.npz"
                    if path.exists():
                        with np.load(path) as stored:
                            for label in {name.rpartition("/")[0] for name in stored.files}:
                                found[index][label] = Table(**{f: stored[f"{label}/{f}"] for f in fields})
                for request in requests.values():
                    if any(request.label not in found[index] for index in group):
                        for index, table in zip(group, walker.tables(group, request)):
                            found[index][request.label] = table
                    bar.update(len(group))
                for index in group:
                    arrays = {f"{label}/{f}": getattr(t, f) for label, t in found[index].items() for f in fields}
                    _save_arrays(self.out / "drafts" / f"{index:05d}.npz", arrays)
            matches = walker.matches()
        longest = max((c.drafter.lookup.max_draft for c in self.candidates if isinstance(c.drafter, Hybrid)), default=1)
        out = []
        for index, text in enumerate(texts):
            tables, rounds = {}, {}
            for key, request in requests.items():
                table = found[index][request.label]
                if isinstance(key, Setting):
                    rounds[key] = _as_rounds(table, text)
                else:
                    tables[key] = table
            out.append(Answer(text, tables, Lookups.of(text, *matches[index], longest), rounds))
        return out

    # 3
    def costs(self, walker: Walker, repeats: int) -> Costs:
        """Seconds of each part of a round."""
        widths = sorted({width for candidate in self.candidates for width in candidate.widths})
        chunks = {}
        for candidate in self.candidates:
            setting = candidate.setting
            chunks.setdefault(chunk_key(setting.schedule, setting.spec_len), (setting.schedule, setting.spec_len))
        key = json.dumps([widths, sorted(chunks), repeats])
        stored = self.records.get("costs", key)
        if stored is None:
            with self.records.phase("costs"):
                stored = self._measure_costs(walker, widths, chunks, repeats)
            self.records.add("costs", key, stored)
        return Costs(
            vanilla=stored["vanilla"],
            verify={int(width): seconds for width, seconds in stored["verify"].items()},
            drafts={chunk: tuple(pair) for chunk, pair in stored["drafts"].items()},
            lookup=stored["lookup"],
        )

    def _measure_costs(
        self, walker: Walker, widths: Sequence[int], chunks: dict[str, tuple[str, int]], repeats: int
    ) -> dict[str, Any]:
        longest = max((c.drafter for c in self.candidates), key=lambda d: d.max_draft)
        vanilla = self.engine.build_drafter(GenerationConfig(method="vanilla"))
        plain = self.engine._plan(vanilla, False, 1).widths[0]
        looking = next((c.drafter.lookup for c in self.candidates if isinstance(c.drafter, Hybrid)), Lookup())
        total = len(widths) + len(chunks) + 2
        actions, steps, counts = {}, {}, {}
        with self.bar(total + repeats, "costs", "part") as bar:

            def add(key: Any, act: Any) -> None:
                steps[key] = long_enough(act)
                actions[key] = lambda: act(steps[key])
                bar.update()

            add("vanilla", walker.round_actions(vanilla, [plain])[plain])
            for width, act in walker.round_actions(longest, widths).items():
                add(("verify", width), act)
            add("lookup", walker.lookup_action(looking))
            requests = self.requests()
            for chunk, (schedule, spec_len) in chunks.items():
                aligned = schedule == "aligned"
                if aligned:
                    drafter = next(s for s in requests if isinstance(s, Setting) and s.spec_len == spec_len)
                    drafter = requests[drafter].drafter
                else:
                    drafter = requests[chunk, 0].drafter
                # The longest drafts, so that passes after the first are timed, too.
                drafter = drafter.replace(tau=np.float32(0))
                limits = (0, int(NO_LIMIT)) if aligned else (0, 1, int(NO_LIMIT))
                if aligned:
                    action = walker.draft_action(drafter)
                    for limit in limits:
                        act = action(limit)
                        counts[chunk, limit] = act()
                        actions[chunk, limit] = act
                else:
                    act = walker.drafted_rounds(drafter)
                    rounds = long_enough(functools.partial(act, 0))
                    for limit in limits:
                        counts[chunk, limit] = rounds, act(limit, rounds)
                        actions[chunk, limit] = functools.partial(act, limit, rounds)
                bar.update()
            keys = list(actions)
            runs: dict[Any, list[float]] = {key: [] for key in keys}
            for _ in range(repeats):
                for key in keys:
                    start = time.perf_counter()
                    actions[key]()
                    runs[key].append(time.perf_counter() - start)
                bar.update()
        seconds = {key: float(np.median(runs[key])) for key in keys}
        drafts = {}
        for chunk in chunks:
            base, (most, passes) = seconds[chunk, 0], counts[chunk, int(NO_LIMIT)]
            spent = seconds[chunk, int(NO_LIMIT)] - base
            first, fewest = seconds.get((chunk, 1), base) - base, counts.get((chunk, 1), (0, 0))[1]
            each = max((spent - first) / (passes - fewest), 0.0) if passes > fewest else max(spent / passes, 0.0)
            # What a draft costs beside its passes.
            call = max(spent - each * passes, 0.0) / most if fewest and passes > fewest else 0.0
            drafts[chunk] = (call, each)
        return {
            "vanilla": seconds["vanilla"] / steps["vanilla"],
            "verify": {str(width): seconds["verify", width] / steps["verify", width] for width in widths},
            "lookup": seconds["lookup"] / steps["lookup"],
            "drafts": drafts,
        }

    # 4
    def predictions(self, answers: Sequence[Answer], costs: Costs) -> list[Prediction]:
        """All settings that differ, the fastest first."""
        out = []
        with self.records.phase("simulate"), self.bar(len(self.candidates), "settings", "setting") as bar:
            for candidate in self.candidates:
                out.append(simulate.predict(answers, candidate.setting, candidate.drafter, candidate.widths, costs))
                bar.update()
        return sorted(out, key=lambda prediction: -prediction.speedup)

    # 5
    def measure(self, phase: str, settings: Sequence[Setting], repeats: int) -> dict[Setting, dict[str, Any]]:
        """Settings timed for real, in blocks, prompt by prompt back to back with `vanilla`."""
        blocks = [settings[at : at + BLOCK] for at in range(0, len(settings), BLOCK)]
        # Prompts that need the same programs come together.
        order = sorted(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))
        turns = [(block, repeat, number) for block in blocks for repeat in range(repeats) for number in order]
        plain = GenerationConfig(method="vanilla", max_new_tokens=self.tokens)
        measured = {}
        with self.records.phase(phase), self.bar(len(turns), f"{phase}, for real", "turn") as bar:
            for position, (block, repeat, number) in enumerate(turns):
                labels = ["vanilla", *(setting.label for setting in block)]
                key = json.dumps([phase, labels, repeat, number])
                if self.records.get("turn", key) is None:
                    configs = [plain, *(dataclasses.replace(plain, method="failfast", **s.options()) for s in block)]
                    found = {}
                    for at in range(len(labels))[:: -1 if position % 2 else 1]:
                        found[labels[at]] = _to_record(warm_answer(self.engine, self.prompts[number], configs[at]))
                    expected = found["vanilla"].pop("output_ids")
                    for record in found.values():
                        if "output_ids" in record:
                            record["equal"] = record.pop("output_ids") == expected
                    self.records.add("turn", key, found)
                bar.update()
        for block in blocks:
            labels = ["vanilla", *(setting.label for setting in block)]
            keys = [json.dumps([phase, labels, repeat, n]) for repeat in range(repeats) for n in order]
            rows = [self.records.get("turn", key) for key in keys]
            for setting in block:
                own = [row[setting.label] for row in rows]
                measured[setting] = {
                    "measured_speedup": sum(row["vanilla"]["decode_s"] for row in rows)
                    / sum(r["decode_s"] for r in own),
                    "measured_s": sum(r["decode_s"] for r in own) / repeats,
                    "vanilla_s": sum(row["vanilla"]["decode_s"] for row in rows) / repeats,
                    "measured_rounds": sum(r["rounds"] for r in own) // repeats,
                    "measured_passes": sum(r["drafter_passes"] for r in own) // repeats,
                    "answers_equal_to_vanilla": f"{sum(r['equal'] for r in own)} of {len(own)}",
                }
        return measured


def _as_rounds(table: Table, text: Text) -> list[Replayed]:
    """The rounds of a walk that went on as the engine's rounds do."""
    out, left = [], len(text.answer)
    for drafted, agreed, passes in zip(table.drafted.tolist(), table.agreed.tolist(), table.passes.tolist()):
        emitted = min(agreed + 1, left)
        out.append(Replayed(drafted, min(agreed, emitted), emitted, passes))
        left -= emitted
    return out


def _to_record(result: Result) -> dict[str, Any]:
    stats = result.stats
    return {
        "decode_s": stats.decode_s,
        "tokens": len(result.output_ids),
        "rounds": stats.rounds,
        "drafter_passes": stats.drafter_passes,
        "output_ids": result.output_ids,
    }


# -- the report --------------------------------------------------------------------------------------------


def distinct(found: Iterable[Prediction], key: Callable[[Prediction], Any]) -> list[Setting]:
    """The first setting of each kind."""
    first: dict[Any, Setting] = {}
    for prediction in found:
        first.setdefault(key(prediction), prediction.setting)
    return list(first.values())


def coarse(found: Sequence[Prediction]) -> list[Setting]:
    """Settings spread over the grid, whatever was predicted for them: every second value, lookups off and shortest."""
    settings = [prediction.setting for prediction in found]

    def some(values: Iterable[Any], most: int | None = None) -> set[Any]:
        values = sorted(set(values))
        return set(values[::2] if most is None else values[:most])

    chunks, taus = some(s.spec_len for s in settings), some(s.tau for s in settings)
    lookups, gains = some((s.lookup_min for s in settings), 2), some(s.min_gain for s in settings)
    cap = _open_first({s.max_spec_len for s in settings})[0]
    # `tau` of a draft of one chunk stands for any.
    single = {s.spec_len for s in settings} - {s.spec_len for s in settings if s.tau != min(taus)}
    return [
        s
        for s in settings
        if s.spec_len in chunks
        and (s.tau in taus or s.spec_len in single)
        and s.max_spec_len == cap
        and s.lookup_min in lookups
        and (s.min_gain in gains or not s.lookup_min)
    ]


def markdown(rows: Sequence[dict[str, Any]], limit: int | None = None) -> str:
    """Settings as a table."""
    head = ("setting", "predicted", "measured", "error", "accepted/round", "passes/round", "rounds: replay / real")
    lines = [head, ["---"] * len(head)]
    for row in rows[:limit]:
        measured, error = row.get("measured_speedup"), row.get("error")
        lines.append(
            (
                row["label"],
                f"{row['predicted_speedup']:.3f}",
                "-" if measured is None else f"{measured:.3f}",
                "-" if error is None else f"{100 * error:+.1f} %",
                f"{row['accepted_per_round']:.2f}",
                f"{row['passes_per_round']:.2f}",
                f"{row['rounds']} / {row.get('measured_rounds', '-')}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(found: Sequence[Prediction], measured: dict[Setting, dict[str, Any]]) -> list[dict[str, Any]]:
    """Predictions with what was measured beside them."""
    rows = []
    for prediction in found:
        row = {"label": prediction.setting.label, **prediction.to_dict(), **measured.get(prediction.setting, {})}
        if "measured_speedup" in row:
            row["error"] = row["predicted_speedup"] / row["measured_speedup"] - 1
        rows.append(row)
    return rows


def run(args: argparse.Namespace) -> int:
    for name in ("verify", "repeats", "cost_repeats", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    prompts = read_prompts(args.prompts, args.limit)
    start = time.perf_counter()
    engine = load_pair(args.target, args.drafter, method="failfast", dtype=args.dtype, max_seq_len=args.max_seq_len)
    engine.decoding = {}  # what a folder recommends is one setting of many here
    grid = parse_grid(args, default_grid(engine))
    tuner = Tuner(engine, [engine.encode(prompt) for prompt in prompts], grid, args.max_new_tokens, args.out)
    load_s = time.perf_counter() - start
    texts = tuner.answers()
    walker = tuner.walker(texts)
    answers = tuner.tables(texts, walker)
    costs = tuner.costs(walker, args.cost_repeats)
    found = tuner.predictions(answers, costs)
    del walker  # and its features
    # Of settings that do the same in every round one stands for all.
    best = distinct(found, lambda prediction: prediction.replay)[: args.verify]
    measured = tuner.measure("verify", best, args.repeats)
    chosen = max(best, key=lambda setting: measured[setting]["measured_speedup"])
    report = {
        "prompts": len(prompts),
        "prompt_source": " ".join(args.prompts),
        "max_new_tokens": args.max_new_tokens,
        "predicted_speedup": next(p.speedup for p in found if p.setting == chosen),
        **measured[chosen],
    }
    tuned = TunedOptions(
        path=args.out / TUNED,
        target={"name": args.target or "the default target", **model_key(engine.target)},
        drafter={"name": args.drafter or "the default drafter", **model_key(engine.drafter)},
        machine=tuner.machine,
        decoding=chosen.options(),
        report=report,
    )
    write_settings(tuned)
    read_settings(tuned.path)
    rows = rows_of(found, measured)
    used = tuner.records.seconds(("answers", "drafts", "costs", "simulate", "verify"))
    summary = {
        "machine": tuner.machine,
        "load_s": load_s,
        "tuner_s": used,
        "phases_s": {p: tuner.records.seconds((p,)) for p in ("answers", "drafts", "costs", "simulate", "verify")},
        "costs": dataclasses.asdict(costs),
        "vanilla": {
            "predicted_s": costs.vanilla * sum(len(text.answer) for text in texts),
            "measured_s": measured[chosen]["vanilla_s"],
        },
        "chosen": {"label": chosen.label, **chosen.options(), **report},
        "settings": rows,
    }
    print(f"{markdown([row for row in rows if 'error' in row])}\n\npredicted best:\n\n{markdown(rows, 15)}\n")
    print(f"{len(tuner.settings)} settings, {len(found)} that differ; tuned in {used:.0f} s: {chosen.label}")
    plain = summary["vanilla"]
    print(f"vanilla: predicted {plain['predicted_s']:.2f} s, measured {plain['measured_s']:.2f} s")
    print(f"{tuned.path}: {measured[chosen]['measured_speedup']:.3f} x vanilla")
    if measured[chosen]["measured_speedup"] < 1:
        print("tune: plain decoding was faster: on texts like these, use --method vanilla", file=sys.stderr)
    if args.full_sweep:
        settings = coarse(found)
        if args.full_sweep == "all":
            # A pass of other chunks costs something else.
            settings = distinct(found, lambda p: (p.replay, p.setting.schedule, p.setting.spec_len))
        summary["sweep"] = sweep(tuner, settings, chosen, found, used, args.repeats)
    (args.out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def sweep(
    tuner: Tuner, settings: Sequence[Setting], chosen: Setting, found: Sequence[Prediction], used: float, repeats: int
) -> dict[str, Any]:
    """Times settings for real, the chosen one among them, and says how far the choice is from the best."""
    settings = list(dict.fromkeys([chosen, *settings]))
    measured = tuner.measure("sweep", settings, repeats)
    rows = sorted(rows_of(found, measured), key=lambda row: -row.get("measured_speedup", 0))
    rows = [row for row in rows if "measured_speedup" in row]
    best, ours = rows[0], measured[chosen]["measured_speedup"]
    seconds = tuner.records.seconds(("sweep",))
    errors = [abs(row["error"]) for row in rows]
    out = {
        "settings": rows,
        "seconds": seconds,
        "seconds_if_all_settings_were_swept": seconds / len(settings) * len(found),
        "best": best["label"],
        "choice_over_best": ours / best["measured_speedup"],
        "tuner_over_sweep_time": used / seconds,
        "tuner_over_sweep_time_of_all_settings": used / (seconds / len(settings) * len(found)),
        "mean_absolute_error": float(np.mean(errors)),
        "largest_absolute_error": float(np.max(errors)),
    }
    print(f"\nfull sweep of {len(settings)} settings in {seconds:.0f} s:\n\n{markdown(rows)}\n")
    print(
        f"the tuner's choice reaches {100 * out['choice_over_best']:.1f} % of the best of the sweep ({best['label']})"
    )
    print(
        f"time: {used:.0f} s against {seconds:.0f} s; all {len(found)} settings that differ would take about "
        f"{out['seconds_if_all_settings_were_swept']:.0f} s at that rate"
    )
    print(f"predicted against measured: {100 * out['mean_absolute_error']:.1f} % off on average")
    return out


def main(argv: list[str] | None = None) -> int:
    """Tunes; exit status 2 for input that cannot be served."""
    parser = argparse.ArgumentParser(
        prog="python -m failfast_jax.bench.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", metavar="P", help="as of failfast_jax.generate (default: the embedded pair)")
    parser.add_argument("--drafter", metavar="P")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--max-seq-len", metavar="n", type=int)
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["humaneval"],
        metavar="humaneval|FILE.jsonl|selfgen FILE.npz",
        help="calibration set, humaneval, FILE.jsonl or FILE.npz",
    )
    parser.add_argument("--limit", metavar="n", type=int, default=16, help="first n prompts (default 16)")
    parser.add_argument("--max-new-tokens", metavar="n", type=int, default=128)
    parser.add_argument("--verify", metavar="n", type=int, default=2, help="best settings timed for real (default 2)")
    parser.add_argument("--repeats", metavar="n", type=int, default=1, help="timed answers a prompt and setting")
    parser.add_argument("--cost-repeats", metavar="n", type=int, default=5, help="timed runs of each part")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="records, summary.json, tuned.json")
    parser.add_argument(
        "--full-sweep",
        nargs="?",
        const="coarse",
        choices=("coarse", "all"),
        help="then time a coarse grid (or all settings whose rounds differ) for real",
    )
    values = parser.add_argument_group("grid", "values separated by commas")
    for field, (flag, _) in GRID_FLAGS.items():
        values.add_argument(flag, dest=field, metavar="a,b,...")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.out}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
