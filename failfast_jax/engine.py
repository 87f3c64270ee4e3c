"""Text around a `Runtime`: prompts to ids, requests to answers, ids to text. The only place that knows tokenisers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from failfast_jax import drafters
from failfast_jax.checkpoints.pair import read_pair
from failfast_jax.checkpoints.tokenizer import stop_tokens
from failfast_jax.decoding.decode_state import FAILED, FINISHED_EOS, FINISHED_LENGTH, RUNNING
from failfast_jax.decoding.diffusion_decoding import blocks_to_write
from failfast_jax.decoding.drafter import Drafter
from failfast_jax.drafters import DIFFUSION_METHOD
from failfast_jax.drafters.dllm import DllmOptions
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.errors import ConfigError, NonFiniteError, OptionError, PromptError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.drafter_model import DrafterModel
from failfast_jax.models.kv_cache import round_up
from failfast_jax.models.transformer import Decoder
from failfast_jax.prompts import Message, Prompt, answer_text, encode, separate
from failfast_jax.results import Result, Round, Stats, StreamEvent
from failfast_jax.runtime.model_runtime import DraftSession, Progress, Request, RowLog, Runtime, Session
from failfast_jax.util.compilation import Executables, counted, enable_compile_cache
from failfast_jax.util.hardware import Profile, bytes_on_a_device, memory_explained
from failfast_jax.util.progress import waiting

__all__ = ["FailFast", "Message", "Prompt", "Result", "Round", "Stats", "StreamEvent"]

logger = logging.getLogger("failfast_jax")

LEAST_ROUNDS = 16
"""Of an answer whose time says what rounds cost: in shorter ones it is the dispatch's."""
FINISH_REASONS = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length"}
"""Why an answer ended, in words."""


class FailFast:
    """A target, a drafter, and the programs compiled for them.

    Args:
      target: a model, or a path or Hub id for `load_model`. For `method="dllm"` the block-diffusion model.
      drafter: likewise; only needed by methods whose drafter is a model.
      tokenizer: a transformers tokenizer; None: the target's own, if it has one.
      drafter_tokenizer: only used to check that both models speak the same tokens.
      dtype: of loaded weights; None: float32 on CPU, bfloat16 elsewhere, on a simulated TPU too.
      max_seq_len: most tokens of prompt and output together; None: the model's context.
      compile_cache: folder of the process's persistent compilation cache, or `off`; None: as JAX is configured. See
        `enable_compile_cache`.
      tensor_parallel: devices that share each layer.
      data_parallel: groups of such devices that share the batch, which must be a multiple of it.
      attention: kernel of cached attention, see `models.attention.KERNELS`; None chooses by platform.
      quantize: None, or `int8`: the target's matrices in 8 bits (`quantization`); output is the quantised target's.
      quantize_drafter: likewise the drafter's.
      rope_theta_drafter: base frequency of a feature-based drafter's rotary embedding; None: its folder's.
      programs: a store of compiled programs to share, `other.runtime.programs`.
      costs: for `auto`, a file that says what rounds cost; None: they are measured when first needed.

    Attributes:
      runtime: the models and everything compiled for them; see `Runtime`.
      target: the model whose text it is.
      drafter: the model that drafts, or None; it may be replaced by one of the same shapes.
      vocab: ids that a drafter may propose.
      load_s: seconds that loading took.
      eos_token_ids: stop tokens; the target's own (see `checkpoints.tokenizer.stop_tokens`) unless replaced.
      corpus: None, or a `drafters.suffix.Corpus` that `suffix` drafts from, too, to be filled between requests.
      time_rounds: whether every round is waited for and timed (`Round.took`).
      decoding: values of options that a request leaves at None; from the drafter's folder.
      chances: what `auto` believes of the drafter's confidences at first; see `drafters.check_chances`.

    Raises:
      ValueError: a model that cannot be read, or two that do not share their tokens; the message names them.
    """

    def __init__(
        self,
        target: Decoder | str | os.PathLike,
        drafter: DrafterModel | str | os.PathLike | None = None,
        *,
        tokenizer: Any = None,
        drafter_tokenizer: Any = None,
        dtype: Any = None,
        max_seq_len: int | None = None,
        compile_cache: str | os.PathLike | None = None,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        attention: str | None = None,
        quantize: str | None = None,
        quantize_drafter: str | None = None,
        rope_theta_drafter: float | None = None,
        programs: Executables | None = None,
        costs: str | os.PathLike | None = None,
    ):
        if compile_cache is not None:
            enable_compile_cache(compile_cache)
        start = time.perf_counter()
        run = {"dtype": dtype, "attention": attention, "quantize": quantize, "quantize_drafter": quantize_drafter}
        run |= {"tensor_parallel": tensor_parallel, "data_parallel": data_parallel, "tokenizer": tokenizer}
        run |= {"rope_theta_drafter": rope_theta_drafter, "drafter_tokenizer": drafter_tokenizer}
        loading = "loading the models" if isinstance(target, Decoder) else f"loading {target}"
        with memory_explained(loading), waiting(loading):
            pair = read_pair(target, drafter, LoadOptions(**run))
        self.runtime = Runtime(pair.target, pair.drafter, max_seq_len=max_seq_len, programs=programs, costs=costs)
        self.target_name, self.drafter_name = pair.target_name, pair.drafter_name
        self.tokenizer, self.vocab = pair.tokenizer, pair.vocab
        self.eos_token_ids = stop_tokens(pair.target.config, pair.tokenizer)
        self.decoding = pair.decoding
        drafters.check_defaults(self.decoding, self.drafter_name)
        self.chances = drafters.check_chances(pair.chances, self.drafter_name)
        self.load_s = time.perf_counter() - start
        self.corpus: Corpus | None = None
        self._profile: Profile | None = None
        self.time_rounds = False

    @property
    def target(self) -> Decoder:
        """The model whose text it is."""
        return self.runtime.target

    @property
    def drafter(self) -> Any:
        """The model that drafts, bound to the target; None without one."""
        return self.runtime.drafter_model

    @drafter.setter
    def drafter(self, model: Any) -> None:
        self.runtime.drafter_model = model

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.runtime.max_seq_len

    @property
    def mesh(self) -> Mesh | None:
        """Devices that the models are spread over; None for one device."""
        return self.runtime.mesh

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.runtime.platform

    def encode(self, prompt: Any, *, template: bool = True) -> list[int]:
        """Token ids of a prompt: a string (one user turn, if the tokenizer has a chat template), messages, or ids.

        Args:
          prompt: `"text"`, `[{"role": "user", "content": "text"}]` or `[1, 2, 3]`.
          template: False takes a string as it is, whatever the tokenizer has.

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
          One result a prompt, in order. Its times are in seconds, and those of the whole batch.

        Raises:
          ValueError: a bad option (`OptionError`) or prompt (`PromptError`), models that the method cannot use
            (`ConfigError`), too little memory (`DeviceMemoryError`), logits that are not finite (`NonFiniteError`).
        """
        return [event.result for event in self._events(prompts, config, options, stream=False)]

    def stream(self, prompts: Any, config: GenerationConfig | None = None, **options: Any) -> Iterator[StreamEvent]:
        """Like `generate`, in slices of a few rounds: yields what became final after each.

        Args:
          prompts: see `generate`, also for `config` and `options`.

        Yields:
          Tokens and text of one sequence that will not change any more; its last event has the whole result. Text may
          lag behind the tokens by a character that is not complete.

        Raises:
          ValueError: see `generate`; at the first event, not at the call.
        """
        yield from self._events(prompts, config, options, stream=True)

    def _events(
        self, prompts: Any, config: GenerationConfig | None, options: dict[str, Any], stream: bool
    ) -> Iterator[StreamEvent]:
        """News of every sequence; without `stream` one event of each, in order."""
        separated = separate(prompts)
        encoded = [self.encode(prompt) for prompt in separated]
        texts = [answer_text(self.tokenizer, *both) for both in zip(separated, encoded)]
        sent = [0] * len(encoded)
        for news in self._run(encoded, self.resolve(config, **options), stream):
            for index, (item, text) in enumerate(zip(news, texts)):
                result = item if isinstance(item, Result) else None
                ids = list(item if result is None else result.output_ids)[sent[index] :]
                sent[index] += len(ids)
                new = None if text is None else text.add(ids, last=result is not None)
                if result is not None and text is not None:
                    result = dataclasses.replace(result, text=text.text)
                if ids or result is not None:
                    yield StreamEvent(index, ids, new, result)

    def resolve(self, config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
        """The request `config` with its method decided, checked; `options` replace single fields.

        Raises:
          OptionError: an option out of its range, or one that the method ignores.
        """
        config = self._with_method(dataclasses.replace(config or GenerationConfig(), **options))
        chosen = drafters.options_of(config, self.platform, self.decoding)
        return config if config.top_p is not None else dataclasses.replace(config, top_p=chosen.top_p)

    def _with_method(self, config: GenerationConfig) -> GenerationConfig:
        return dataclasses.replace(config, method=config.method or drafters.DEFAULT_METHOD)

    def request(self, prompt: Sequence[int], config: GenerationConfig, sequence: int = 0) -> Request:
        """What a session is asked.

        Args:
          prompt: token ids, see `encode`.
          config: limits, sampling and stop tokens are taken from it; it must be resolved, see `resolve`.
          sequence: tells its randomness from that of others with the same seed.
        """
        return Request(
            prompt=prompt,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            sequence=sequence,
            eos=() if config.ignore_eos else self.eos_token_ids,
        )

    def session(self, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> Session:
        """The programs that answer prompts (ids), and others of about their length, as `config` (resolved) says.

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
        options = drafters.options_of(config, self.platform)
        model = self.target.with_block_size(options.block_size) if options.block_size else self.target
        block, static = model.config.block_size, options.static_for(model)
        if options.released_length and model.config.token_shift and config.max_new_tokens < block:
            raise OptionError(
                f"--max-new-tokens {config.max_new_tokens}: must be at least the block size {block} for "
                "--released-length"
            )
        whole = round_up(config.max_new_tokens, block) + 1 if options.released_length else config.max_new_tokens
        capacity, released = self.runtime.capacity(longest, whole, block), options.released_length
        if not blocks_to_write(model.config, longest, config.max_new_tokens, capacity, released=released)[0]:
            raise PromptError(f"no whole block of {block} fits behind the prompt within {capacity} tokens")
        return self.runtime.diffusion_session(
            model,
            batch=batch,
            capacity=capacity,
            threshold=options.threshold_for(model),
            released_length=released,
            graph=self._draft_graph(options, model, static["small_block"]),
            **static,
        )

    def _draft_graph(self, options: DllmOptions, model: Decoder, small_block: int) -> np.ndarray | None:
        """The draft states of `--spiffy`.

        Raises:
          OptionError: no calibrated graph is there, or one for other blocks or with fewer states.
        """
        if not options.spiffy:
            return None if options.spiffy is None else np.zeros((0, small_block), np.int32)
        return options.read_graph(self.target_name).states(options.spiffy, model.config.block_size, small_block)

    @contextlib.contextmanager
    def profile(self, folder: str | os.PathLike) -> Iterator[None]:
        """Inside, each answer's rounds are traced by `jax.profiler` into `folder`; compiling and prefill are left out.

        Raises:
          OSError: the folder cannot be made; or, at the end, a trace could not be written.
        """
        profile = self._profile = Profile(Path(folder))
        try:
            yield
        finally:
            self._profile = None
        profile.check()

    def _run(self, prompts: list[list[int]], config: GenerationConfig, stream: bool) -> Iterator[list]:
        """Yields lists of output ids so far (streaming only), at last the list of results."""
        compile_before = self.runtime.programs.seconds
        with counted() as so_far:
            session = self.session(prompts, config)
            self._explain(session, config)
            with memory_explained(f"{len(prompts)} x {session.capacity} tokens", lambda: self._memory(session)):
                session.prepare(max(map(len, prompts)))
                start = time.perf_counter()
                # While the loop, the largest program, may still be compiling.
                with waiting(f"prefill of {sum(map(len, prompts))} tokens", beside_bar=False):
                    state = session.prefill([self.request(prompt, config, row) for row, prompt in enumerate(prompts)])
                    jax.block_until_ready(state)
                times = {"prefill_s": time.perf_counter() - start}
                session.wait()
                times["compile_s"] = self.runtime.programs.seconds - compile_before
                weighs = isinstance(session, DraftSession) and session.drafter.uses_costs
                session, costs = self.runtime.costs.price(session) if weighs else (session, None)
                took, syncs = [], 1
                with contextlib.nullcontext() if self._profile is None else self._profile.traced():
                    while True:
                        start = time.perf_counter()
                        # The first slice is one round: the first words should not wait for the next ones.
                        rounds = (session.stream_rounds if syncs > 1 else 1) if stream else None
                        state = session.advance(state, 1 if self.time_rounds else rounds)
                        progress = session.read(state)
                        took.append(time.perf_counter() - start)
                        syncs += 1
                        if RUNNING not in progress.finish:
                            break
                        if stream:
                            yield progress.ids
            counts = so_far()
        self._check_finite(prompts, progress)
        times["decode_s"], logs = sum(took), session.rounds(state)
        plain = weighs and not (self.time_rounds or self._profile)  # else waits between rounds take time, too
        if plain and max(len(log.rounds) for log in logs) >= LEAST_ROUNDS:
            self.runtime.costs.learn(session, logs, times["decode_s"])
        if self.time_rounds:
            logs = [log.timed(took) for log in logs]
        measured = {"compiles": counts.compiles, "cache_hits": counts.cache_hits, "host_syncs": syncs + 1}
        yield [
            self._result(config, prompt, ids, finish, log, measured | times | {"costs": costs})
            for prompt, ids, finish, log in zip(prompts, progress.ids, progress.finish, logs)
        ]

    def _explain(self, session: Session, config: GenerationConfig) -> None:
        """What was chosen, for `--verbose`."""
        model = self.target
        kernel = model.execution.resolved(model.dtype, model.config.head_dim)
        plan = getattr(session, "plan", None)
        widths = "" if plan is None else f", verifies of {', '.join(map(str, plan.widths))} rows"
        logger.info("%s in %s, attention %s; --method %s", self.target_name, model.dtype, kernel, config.method)
        logger.info("room for %d x %d tokens%s", session.batch, session.capacity, widths)

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

    def _result(
        self, config: GenerationConfig, prompt: list[int], ids: list[int], finish: int, log: RowLog, measured: dict
    ) -> Result:
        return Result(
            prompt_ids=list(prompt),
            output_ids=ids,
            text=None,  # see `_events`
            finish_reason=FINISH_REASONS[finish],
            method=config.method,
            stats=Stats.of(log, load_s=self.load_s, tokens_per_s=len(ids) / measured["decode_s"], **measured),
            rounds=log.rounds,
        )

    def build_drafter(self, config: GenerationConfig) -> Drafter:
        """The drafter of the request `config`: of its method, with its settings.

        Raises:
          ConfigError, OptionError: the method needs another kind of model than `drafter`.
        """
        drafter = drafters.build_drafter(
            self._with_method(config),
            model=self.drafter,
            model_name=self.drafter_name,
            vocab=self.vocab,
            platform=self.platform,
            defaults=self.decoding,
            chances=self.chances,
        )
        if self.corpus is None:
            return drafter
        if self.corpus.tokens.max() >= self.target.config.vocab_size:
            raise PromptError(f"the corpus holds token id {self.corpus.tokens.max()}, which {self.target_name} lacks")
        return drafter.with_corpus(self.corpus.tokens)
