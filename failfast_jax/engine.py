"""Text around a `Runtime`: prompts to ids, requests to answers, ids to text. The only module that knows tokenizers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from failfast_jax import drafters
from failfast_jax.checkpoints.model_folder import Pair, read_pair
from failfast_jax.checkpoints.tokenizer import stop_tokens
from failfast_jax.decoding.decode_state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING
from failfast_jax.decoding.diffusion_decoding import blocks_to_write
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.default_pair import found_models
from failfast_jax.drafters import DIFFUSION_METHOD
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.errors import ConfigError, NonFiniteError, OptionError, PromptError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.load_options import LoadOptions
from failfast_jax.models import quantization
from failfast_jax.models.kv_cache import round_up
from failfast_jax.models.transformer import Decoder
from failfast_jax.policy.cost_book import RoundCounts
from failfast_jax.prompts import Message, Prompt, answer_text, encode, separate
from failfast_jax.results import Result, Round, Stats, StreamEvent
from failfast_jax.runtime.model_runtime import DraftSession, Progress, Request, Runtime, Session
from failfast_jax.text_stream import SequenceEvents
from failfast_jax.util.compilation import count_compiles
from failfast_jax.util.compile_cache import enable_compile_cache
from failfast_jax.util.hardware import bytes_on_a_device, explain_out_of_memory
from failfast_jax.util.progress import waiting

__all__ = ["FailFast", "Message", "Prompt", "Result", "Round", "Stats", "StreamEvent"]

logger = logging.getLogger("failfast_jax")

LEAST_ROUNDS = 16
"""Rounds of an answer from whose time costs are learned; in a shorter answer dispatching takes most of the time."""
FINISH_REASONS = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length"}


class FailFast:
    """A target, a drafter, and the programs compiled for them. `FailFast.load` makes one.

    `FailFast(target, drafter, **changes)`, the former spelling of `load` with a target, works for one release more.

    Args:
      pair: the loaded models and their tokenizer; see `checkpoints.model_folder`.
      drafter: only of the former spelling.
      options: `max_seq_len`, `programs`, `costs` and `widths` are taken from it; see `LoadOptions`.
      changes: replace single fields of `options`.

    Attributes:
      runtime: the models and everything compiled for them; see `Runtime`.
      target: the model whose text is written.
      drafter: the model that drafts, or None; it may be replaced by another of the same shapes.
      max_seq_len: maximum tokens of a prompt and its answer together.
      mesh: devices that the models are spread over; None for one device.
      platform: `cpu`, `gpu` or `tpu`.
      vocab: ids below it may be drafted.
      has_default_target: True if the target is the embedded one.
      load_s: seconds that loading took.
      eos_token_ids: stop tokens; the target's (see `checkpoints.tokenizer.stop_tokens`) unless replaced.
      corpus: None, or a `drafters.suffix.Corpus` that `suffix` drafts from, too, to be filled between requests.
      time_rounds: True: every round is waited for and timed (`Round.took`).
      profile: None, or a folder into which `jax.profiler` traces each answer's rounds, without compiling and prefill.
      decoding: values of options that a request leaves at None; from the drafter's folder.
      chances: the prior of `auto` for the drafter's confidences; see `drafters.check_chances`.

    Raises:
      ValueError: a model that cannot be read, or two that do not share their tokens; the message names them.
    """

    def __init__(self, pair: Any = None, drafter: Any = None, options: LoadOptions = LoadOptions(), **changes: Any):
        start = time.perf_counter()
        options = options.changed(**changes)
        if pair is None:
            raise OptionError("FailFast(): has no models; FailFast.load() loads the default pair")
        if not isinstance(pair, Pair):
            pair = _opened(pair, drafter, options)
        shared = {name: getattr(options, name) for name in ("max_seq_len", "programs", "costs", "widths")}
        runtime = self.runtime = Runtime(pair.target, pair.drafter, **shared)
        self.target, self.max_seq_len = runtime.target, runtime.max_seq_len
        self.mesh, self.platform = runtime.mesh, runtime.platform
        self.target_name, self.drafter_name = pair.target_name, pair.drafter_name
        self.tokenizer, self.vocab = pair.tokenizer, pair.vocab
        self.eos_token_ids = stop_tokens(pair.target.config, pair.tokenizer)
        self.decoding = pair.decoding
        drafters.check_defaults(self.decoding, self.drafter_name)
        self.chances = drafters.check_chances(pair.chances, self.drafter_name)
        self.load_s = time.perf_counter() - start
        self.corpus: Corpus | None = None
        self.time_rounds = False
        self.profile: Path | None = None
        self.has_default_target = False

    @classmethod
    def load(
        cls, target: Any = None, drafter: Any = None, options: LoadOptions = LoadOptions(), **changes: Any
    ) -> FailFast:
        """Loads a target and its drafter; without arguments the embedded default pair.

        Args:
          target: a folder, `.gguf` file or Hub id, or a model in memory; or an engine, whose target, tokenizer and
            compiled programs are shared. For `method="dllm"` the block-diffusion model. None: the default target.
          drafter: a source (`smollm2-diffusion` is built in) or a model. None: with the default target its drafter,
            otherwise no model.
          options: how to load them; see `LoadOptions`.
          changes: replace single fields of `options`: `dtype="bfloat16"`.

        Raises:
          ValueError: a model is missing, unreadable or does not fit; the message names it.
        """
        start = time.perf_counter()
        options = options.changed(**changes)
        base = target if isinstance(target, FailFast) else None
        default = target is None if base is None else base.has_default_target
        if base is not None:
            target = base.target
            options = options.changed(tokenizer=base.tokenizer, programs=base.runtime.programs)
        pair = _opened(*found_models(target, drafter, options, default))
        engine = cls(pair if base is None else dataclasses.replace(pair, target_name=base.target_name), options=options)
        engine.load_s = time.perf_counter() - start
        engine.has_default_target = default
        return engine

    @property
    def drafter(self) -> Any:
        """The model that drafts, bound to the target; None without one."""
        return self.runtime.drafter_model

    @drafter.setter
    def drafter(self, model: Any) -> None:
        self.runtime.drafter_model = model

    @functools.cached_property
    def arithmetic(self) -> str:
        """The target's, as `quantization.arithmetic` names it."""
        return quantization.arithmetic(self.target)

    @functools.cached_property
    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of `target` and, if there is one, `drafter`, as `quantization.parameter_bytes` counts them."""
        sizes = {"target": quantization.parameter_bytes(self.target)}
        if self.drafter is not None:
            sizes["drafter"] = quantization.parameter_bytes(self.drafter, self.target)
        return sizes

    def encode(self, prompt: Any, *, template: bool = True) -> list[int]:
        """Encodes a prompt: a string (one user turn, if the tokenizer has a chat template and `template`), messages
        (`[{"role": "user", "content": "text"}]`), or ids.

        Raises:
          PromptError: nothing to encode with, an empty prompt, or an id outside the vocabulary.
        """
        return encode(prompt, self.tokenizer, self.target.config.vocab_size, self.target_name, template=template)

    def generate(self, prompts: Any, config: GenerationConfig | None = None, **options: Any) -> list[Result]:
        """Answers one prompt or a batch, each whole answer in one dispatch.

        Args:
          prompts: a string, a list of strings, messages, a list of messages, ids, or a list of ids.
          config: the request; None: `GenerationConfig()`.
          options: replace single fields of it: `max_new_tokens=64`.

        Returns:
          One result per prompt, in order. Its times are in seconds, and those of the whole batch.

        Raises:
          ValueError: a bad option (`OptionError`) or prompt (`PromptError`), models that the method cannot use
            (`ConfigError`), too little memory (`DeviceMemoryError`), logits that are not finite (`NonFiniteError`).
        """
        return [event.result for event in self._answer(prompts, self.resolve(config, **options), stream=False)]

    def stream(self, prompts: Any, config: GenerationConfig | None = None, **options: Any) -> Iterator[StreamEvent]:
        """Like `generate`, in slices of a few rounds: yields what became final after each.

        Args:
          prompts: see `generate`, also for `config` and `options`.

        Yields:
          Tokens and text of one sequence that will not change any more; its last event has the whole result. Text may
          come later than tokens: incomplete characters are held back.

        Raises:
          ValueError: see `generate`.
        """
        yield from self._answer(prompts, self.resolve(config, **options), stream=True)

    def resolve(self, config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
        """Returns the request `config` with its method decided and its options checked; see `drafters.resolve`.

        Args:
          options: replace single fields of `config`.

        Raises:
          OptionError: an option out of its range, or one that the method ignores.
        """
        config = config or GenerationConfig()
        config = dataclasses.replace(config, **options) if options else config
        return drafters.resolve(config, self.decoding)

    def _answer(self, prompts: Any, config: GenerationConfig, stream: bool) -> Iterator[StreamEvent]:
        """Yields the events of every sequence; without `stream` the last one of each, in order."""
        prompts = separate(prompts)
        encoded = [self.encode(prompt) for prompt in prompts]
        texts = [answer_text(self.tokenizer, prompt, ids) for prompt, ids in zip(prompts, encoded)]
        sequences = [SequenceEvents(row, text) for row, text in enumerate(texts)]
        compiled_before, slices = self.runtime.programs.seconds, []
        with count_compiles() as counts:
            session = self.session(encoded, config)
            self._explain(session, config)
            models = {"--quantize": self.target, "--quantize-drafter": self.drafter}
            needs = functools.partial(self._memory, session), functools.partial(quantization.smaller_layouts, models)
            with explain_out_of_memory(f"{len(encoded)} x {session.capacity} tokens", *needs):
                state, prefill_s = self._prefill(session, encoded, config)
                compile_s, costs = self.runtime.programs.seconds - compiled_before, None
                if isinstance(session, DraftSession) and session.drafter.shape.uses_costs:
                    session, costs = self.runtime.costs.price(session)
                with contextlib.nullcontext() if self.profile is None else jax.profiler.trace(self.profile):
                    for part in self._decode(session, state, stream):
                        latest, progress, seconds = part
                        slices.append(seconds)
                        if stream and RUNNING in progress.finish:
                            events = (each.event(ids) for each, ids in zip(sequences, progress.ids))
                            yield from (event for event in events if event.ids)
        self._check_finite(encoded, progress)
        logs = session.rounds(latest)
        undisturbed = not (stream or self.time_rounds or self.profile)  # else waits between rounds take time, too
        if costs is not None and undisturbed and max(len(log.rounds) for log in logs) >= LEAST_ROUNDS:
            self.runtime.costs.learn(session, RoundCounts.of(logs, session.plan.widths), sum(slices))
        measured = {
            "load_s": self.load_s,
            "compile_s": compile_s,
            "prefill_s": prefill_s,
            "decode_s": sum(slices),
            "compiles": counts.compiles,
            "cache_hits": counts.cache_hits,
            "host_syncs": len(slices) + 2,  # after prefill, after each slice, and for the rounds
            "parameter_bytes": self.parameter_bytes,
            "costs": costs,
        }
        for row, (sequence, ids, log) in enumerate(zip(sequences, progress.ids, logs)):
            log = log.timed(slices) if self.time_rounds else log
            result = Result(
                prompt_ids=list(encoded[row]),
                output_ids=ids,
                text=None,  # see `SequenceEvents`
                finish_reason=FINISH_REASONS[progress.finish[row]],
                method=config.method,
                arithmetic=self.arithmetic,
                stats=Stats.of(log, tokens_per_s=len(ids) / sum(slices), **measured),
                rounds=log.rounds,
            )
            yield sequence.event(ids, result)

    def _prefill(self, session: Session, prompts: list[list[int]], config: GenerationConfig) -> tuple[Any, float]:
        """Returns a state with the prompts in the caches, once all programs are compiled, and the prefill's seconds."""
        session.prepare(max(map(len, prompts)))
        requests = [self.request(prompt, config, row) for row, prompt in enumerate(prompts)]
        # The loop, the largest program, may still be compiling meanwhile.
        with waiting(f"prefill of {sum(map(len, prompts))} tokens", in_files=False):
            start = time.perf_counter()
            state = jax.block_until_ready(session.prefill(requests))
            seconds = time.perf_counter() - start
        session.wait()
        return state, seconds

    def _decode(self, session: Session, state: Any, stream: bool) -> Iterator[tuple[Any, Progress, float]]:
        """Yields the state, the texts and the seconds of each call of the device: one call for an answer, or one per
        slice of a stream. A state is donated to the next call."""
        # The first slice is a single round: the first words should not wait for the next ones.
        rounds, running = 1 if stream or self.time_rounds else None, True
        while running:
            start = time.perf_counter()
            state = session.advance(state, rounds)
            progress = session.read(state)
            yield state, progress, time.perf_counter() - start
            running = RUNNING in progress.finish
            rounds = 1 if self.time_rounds else session.stream_rounds

    def request(self, prompt: Sequence[int], config: GenerationConfig, sequence: int = 0) -> Request:
        """Returns the request of a session's row: `prompt` are token ids, `config` is resolved (see `resolve`), and
        requests of one seed with another `sequence` draw other random numbers."""
        common = {name: getattr(config, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
        eos = () if config.ignore_eos else self.eos_token_ids
        return Request(prompt=prompt, sequence=sequence, eos=eos, **common)

    def session(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Session:
        """Returns the programs that answer `prompts` (ids) of about this length, for a resolved `config`.

        Raises:
          ConfigError, OptionError: the method needs other models or options.
          PromptError: a prompt is too long.
        """
        longest = max(map(len, prompts))
        if config.method == DIFFUSION_METHOD:
            return self._diffusion_session(longest, config, len(prompts))
        if self.target.config.is_diffusion:
            raise ConfigError(
                f"{self.target_name}: a block-diffusion model cannot verify drafts; name an autoregressive target, "
                f"or let it write on its own with --method {DIFFUSION_METHOD}"
            )
        drafter, batch = self.build_drafter(config), len(prompts)
        plan = self.runtime.plan(drafter, config.exact, batch)
        capacity = self.runtime.capacity(longest, config.max_new_tokens, drafter.max_draft)
        return self.runtime.session(drafter, batch=batch, capacity=capacity, plan=plan)

    def _diffusion_session(self, longest: int, config: GenerationConfig, batch: int) -> Session:
        if not self.target.config.is_diffusion:
            raise ConfigError(f"{self.target_name}: method {DIFFUSION_METHOD} needs a block-diffusion model")
        options = config.resolution.options
        model = self.target.with_block_size(options.block_size) if options.block_size else self.target
        block, schedule = model.config.block_size, options.schedule_for(model)
        if options.released_length and model.config.token_shift and config.max_new_tokens < block:
            raise OptionError(
                f"--max-new-tokens {config.max_new_tokens}: must be at least the block size {block} for "
                "--released-length"
            )
        whole = round_up(config.max_new_tokens, block) + 1 if options.released_length else config.max_new_tokens
        capacity, released = self.runtime.capacity(longest, whole, block), options.released_length
        if not blocks_to_write(model.config, longest, config.max_new_tokens, capacity, released=released)[0]:
            raise PromptError(f"no whole block of {block} fits after the prompt within {capacity} tokens")
        return self.runtime.diffusion_session(
            model,
            batch=batch,
            capacity=capacity,
            released_length=released,
            graph=options.states_for(model, self.target_name, schedule["small_block"]),
            **schedule,
        )

    def _explain(self, session: Session, config: GenerationConfig) -> None:
        """Logs the choice of kernel, capacity and widths, for `--verbose`."""
        model = self.target
        kernel = model.execution.resolved(model.dtype, model.config.head_dim)
        plan = getattr(session, "plan", None)
        widths = "" if plan is None else f", verifies of {', '.join(map(str, plan.widths))} rows"
        choice = f"--method {config.method}, attention {kernel}"
        logger.info("%s; capacity of %d x %d tokens%s", choice, session.batch, session.capacity, widths)

    def _memory(self, session: Session) -> dict[str, int]:
        trees = {self.target_name: self.target, self.drafter_name: self.drafter, "caches": session.shapes}
        return {name: bytes_on_a_device(tree) for name, tree in trees.items() if tree is not None}

    def _check_finite(self, prompts: list[list[int]], progress: Progress) -> None:
        for row, (prompt, ids, finish) in enumerate(zip(prompts, progress.ids, progress.finish)):
            if finish == FAILED:
                which = f" of prompt {row}" if len(prompts) > 1 else ""
                raise NonFiniteError(
                    f"{self.target_name}: the logits for position {len(prompt) + len(ids)}{which} are not finite, so "
                    f"there is no token to emit: values overflow in {self.target.dtype}, or weights are NaN; check "
                    "the checkpoint, or choose another --dtype (float32 has the widest range)"
                )

    def build_drafter(self, config: GenerationConfig) -> Drafter:
        """Builds the drafter of the request `config`, which is resolved here if it is not yet.

        Raises:
          ConfigError, OptionError: the method needs another kind of model than `drafter`.
        """
        config = config if config.resolution is not None else self.resolve(config)
        corpus = None if self.corpus is None else self.corpus.tokens
        if corpus is not None and corpus.max() >= self.target.config.vocab_size:
            raise PromptError(f"the corpus holds token id {corpus.max()}, which {self.target_name} lacks")
        model = {"model": self.drafter, "model_name": self.drafter_name, "vocab": self.vocab, "corpus": corpus}
        return drafters.build_drafter(config, **model, platform=self.platform, chances=self.chances)


def _opened(target: Any, drafter: Any, options: LoadOptions) -> Pair:
    """Reads a pair of models from their sources, or takes those in memory."""
    if options.compile_cache is not None:
        enable_compile_cache(options.compile_cache)
    loading = "loading the models" if isinstance(target, Decoder) else f"loading {target}"
    with explain_out_of_memory(loading), waiting(loading):
        return read_pair(target, drafter, options)
