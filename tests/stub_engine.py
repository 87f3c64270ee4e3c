"""An engine without models: answers in no time, and counts them."""

from __future__ import annotations

import functools
import types

import jax.numpy as jnp

from failfast_jax.bench import comparison
from failfast_jax.bench.comparison import EnginePool, role_of
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.checkpoints import hub
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast, Result, Round, Stats
from failfast_jax.models.drafter_model import BLOCK_DIFFUSION
from failfast_jax.options import flag_of
from failfast_jax.results import RowLog


class StubTokenizer:
    """A character an id."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(map(chr, ids))


class StubEngine(FailFast):
    """Writes `text(prompt)` with every method; drafts of `spec_len` (4 by default) tokens, of which half are accepted.

    Attributes:
      given: `(method, spec_len, prompt)` of its answers, in order.
      fail_after: raises KeyboardInterrupt instead of this answer and all later ones.
      wrong: methods that spoil their third token.
      cold: `(method, spec_len)` whose next answer compiles.
    """

    # Plain attributes in the place of FailFast's properties.
    target = types.SimpleNamespace(logits=lambda ids: jnp.asarray([[[0.0, 3.0, 1.0]]]))
    drafter, max_seq_len, corpus, mesh = None, 4096, None, None

    def __init__(self, text=lambda prompt: "an answer of sixteen tokens"[:16], max_seq_len: int = 4096):
        self.text, self.max_seq_len = text, max_seq_len
        self.tokenizer, self.target_name = StubTokenizer(), "stub"
        self.given: list[tuple] = []
        self.fail_after: int | None = None
        self.wrong: set[str] = set()
        self.cold: set[tuple] = set()

    def encode(self, prompt) -> list[int]:
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            prompt = "".join(f"<{m['role']}>{m['content']}" for m in prompt)
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def resolve(self, config):
        return config

    def build_drafter(self, config):
        return Drafter()

    def generate(self, prompts, config) -> list[Result]:
        if self.fail_after is not None and len(self.given) >= self.fail_after:
            raise KeyboardInterrupt
        return [self._answer(prompt, config) for prompt in prompts]

    def _answer(self, prompt, config) -> Result:
        place = config.method, config.options.get("spec_len")
        compiled = place in self.cold
        self.cold.discard(place)
        self.given.append((*place, self.tokenizer.decode(prompt)))
        ids = self.tokenizer.encode(self.text(self.tokenizer.decode(prompt)))
        if config.method in self.wrong:
            ids[2] = 0
        length = 0 if config.method == "vanilla" else config.options.get("spec_len") or 4
        rounds, done = [], 0
        while done < len(ids):
            accepted = length // 2 if len(rounds) % 2 else length
            emitted = ids[done : done + accepted + 1]
            rounds.append(Round(ids[:length], [0.5] * length, accepted, emitted, length // 2))
            done += len(emitted)
        times = {"load_s": 0.0, "compile_s": 0.0, "prefill_s": 0.5, "tokens_per_s": 1.0}
        # Drafts cost a tenth of a step a token: six or seven tokens a round are best here.
        times["decode_s"] = len(rounds) * (1.0 + 0.1 * length)
        log = RowLog(rounds, drafter_passes=sum(r.passes for r in rounds), target_passes=len(rounds))
        stats = Stats.of(log, **times, compiles=int(compiled), cache_hits=0, host_syncs=3)
        return Result(list(prompt), ids, self.tokenizer.decode(ids), "eos", config.method, stats, rounds)


class StubEnginePool(EnginePool):
    """An `EnginePool` around one stub, with the drafters that were named taken to exist."""

    def __init__(self, engine: StubEngine, config: RunConfig):
        self.sources = {name: getattr(config, name) for name in ("target", "drafter", "ar_drafter")}
        self.options, self.base = {"dtype": None}, engine
        self._built = {None: engine}

    def get(self, row, config):
        kinds = METHODS[row.method].kinds
        source = row.options.get("drafter", self.sources.get(role_of(row.method)))
        default = self.sources["target"] is None and BLOCK_DIFFUSION in kinds
        if kinds and METHODS[row.method].needs_model and source is None and not default:
            raise ValueError(f"needs {flag_of(role_of(row.method))}, a model of kind {' or '.join(kinds)}")
        return self.base


def use_stub(monkeypatch) -> StubEngine:
    """Puts a stub in the place of every engine of `bench run`; all sources are taken to be there."""
    engine = StubEngine()
    monkeypatch.setattr(comparison, "EnginePool", functools.partial(StubEnginePool, engine))
    monkeypatch.setattr(hub, "resolve_source", lambda source: source)
    return engine
