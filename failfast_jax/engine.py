"""Host side: text to ids, prefill, the compiled loop, ids to text. The only place that knows tokenisers."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from failfast_jax.checkpoints.drafter import decoding_defaults, is_drafter_folder
from failfast_jax.checkpoints.loading import as_dtype, borrows_tokens, load_drafter, open_source
from failfast_jax.checkpoints.tokenizer import check_same_tokens, load_tokenizer
from failfast_jax.checkpoints.tuned import check_models, other_machine, read_settings
from failfast_jax.compilation import CompileCounts, Executables, Program, compile_counts, enable_compile_cache
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding import dllm, round
from failfast_jax.decoding.exact import interchangeable_widths
from failfast_jax.decoding.state import FINISHED_EOS, FINISHED_LENGTH, RUNNING, Sampling
from failfast_jax.drafters import METHODS, Drafter, check_acceptance
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.errors import ConfigError, OptionError, PromptError
from failfast_jax.models import quantization, sharding
from failfast_jax.models.attention import refusal
from failfast_jax.models.conditioned import BoundConditioned
from failfast_jax.models.transformer import Decoder

logger = logging.getLogger("failfast_jax")

DIFFUSION_METHOD = "dllm"
"""The block-diffusion model writing on its own; every other method is a drafter in front of a target."""

SMALLEST_CAPACITY = 256
STREAM_ROUNDS = 4
_NO_LIMIT = np.int32(2**30)
_FINISH_REASONS = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length"}

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one sequence."""

    drafted: list[int]
    confidence: list[float]
    accepted: int
    emitted: list[int]
    passes: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of one answer. Times are in seconds and, in a batch, those of the whole batch."""

    rounds: int
    drafted: int
    accepted: int
    drafter_passes: int
    target_passes: int
    load_s: float
    compile_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    compiles: int
    cache_hits: int
    host_syncs: int


@dataclasses.dataclass(frozen=True)
class Result:
    """One answer."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    finish_reason: str
    method: str
    stats: Stats
    rounds: list[Round]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: what `--json` prints."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """News about one sequence of a streamed request."""

    sequence: int
    ids: list[int]
    """Tokens that became final since the last event."""
    text: str | None
    """Text that became final since the last event; None without a tokenizer."""
    result: Result | None = None
    """Set in the sequence's last event."""


def load_with_tokenizer(
    source: str | os.PathLike,
    dtype: Any = None,
    mesh: Mesh | None = None,
    *,
    drafter: bool = False,
    quantize: str | None = None,
) -> tuple[Decoder, Any]:
    """A model and its tokenizer (None if it has none), read side by side; on a mesh, each device its part."""
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, source)
        opened = open_source(source)
        place = None if mesh is None else sharding.placement(opened.config, mesh, drafter=drafter)
        return opened.load(as_dtype(dtype), place=place, quantize=quantize), tokenizer.result()


def with_block_size(model: Decoder, block_size: int) -> Decoder:
    """The same weights under another block-diffusion block."""
    clone = copy.copy(model)
    clone.config = dataclasses.replace(model.config, block_size=block_size)
    return clone


def _bucket(value: int) -> int:
    """The smallest power of two that holds `value`."""
    return max(SMALLEST_CAPACITY, 1 << (value - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class _Job:
    """A prepared request: programs that are being compiled, and how to call them."""

    prefill_programs: list[Future]
    loop_program: Future
    prefill: Callable[[], Any]
    """Makes the state with the prompts in the caches."""
    advance: Callable[[Any, np.int32], Any]
    """`(state, most rounds) -> state`; donates the state."""
    snapshot: Callable[[Any], tuple]
    """Device arrays of `(ids, start, end, finish)`, from which new tokens are read."""
    slice: int
    """Rounds between two looks at the state when streaming."""


class FailFast:
    """A target, a drafter, and the programs compiled for them.

    Args:
      target: a model, or a path or Hub id for `load_model`. For `method="dllm"` the block-diffusion model.
      drafter: likewise; only needed by methods whose drafter is a model.
      tokenizer: a transformers tokenizer; None: the target's own, if it has one.
      drafter_tokenizer: only used to check that both models speak the same tokens.
      dtype: of loaded weights; None: float32 on CPU, bfloat16 elsewhere.
      max_seq_len: most tokens of prompt and output together; None: the model's context.
      compile_cache: folder of the persistent compilation cache, or `off`; see `enable_compile_cache`.
      tensor_parallel: devices that share each layer.
      data_parallel: groups of such devices that share the batch, which must be a multiple of it.
      attention: kernel of cached attention, see `models.attention.KERNELS`; None chooses by platform.
      quantize: None, or `int8`: the target's matrices in 8 bits, see `quantization`. Output is then that of the
        quantised target, with every method.
      quantize_drafter: likewise the drafter's.
      settings: a file of `python -m failfast_jax.bench.tune`, made for this pair.

    Attributes:
      eos_token_ids: stop tokens; the target's own unless replaced.
      corpus: earlier texts that `suffix` drafts from, too; None, or a `drafters.suffix.Corpus` to be filled between
        requests.
      decoding: options that take these values where a request leaves them at None; from `settings`, else from the
        drafter's folder.

    Raises:
      ValueError: a model that cannot be read, or two that do not share their tokens; the message names them.
    """

    def __init__(
        self,
        target: Decoder | str | os.PathLike,
        drafter: Decoder | BoundConditioned | str | os.PathLike | None = None,
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
        settings: str | os.PathLike | None = None,
    ):
        quantization.check(quantize)
        quantization.check(quantize_drafter, "--quantize-drafter")
        if quantize_drafter is not None and drafter is None:
            raise OptionError(f"--quantize-drafter {quantize_drafter}: there is no drafter")
        enable_compile_cache(compile_cache)
        start = time.perf_counter()
        if attention is not None and (reason := refusal(attention, jax.devices()[0])):
            raise OptionError(f"--attention {attention}: {reason}")
        tuned = None if settings is None else read_settings(settings)
        one_device = tensor_parallel == data_parallel == 1
        self.mesh = None if one_device else sharding.make_mesh(tensor_parallel, data_parallel)
        self.target_name, self.drafter_name = _name(target, "target"), _name(drafter, "drafter")
        if not isinstance(target, Decoder):
            target, loaded = load_with_tokenizer(target, dtype, self.mesh, quantize=quantize)
            tokenizer = tokenizer or loaded
        self.decoding: dict[str, Any] = {}
        if drafter is not None and not isinstance(drafter, (Decoder, BoundConditioned)) and is_drafter_folder(drafter):
            self.decoding = decoding_defaults(drafter, jax.default_backend())
            drafter = load_drafter(drafter, target, self.target_name)
            drafter_tokenizer = tokenizer  # it drafts in its target's tokens
        if drafter is not None and not isinstance(drafter, (Decoder, BoundConditioned)):
            drafter, loaded = load_with_tokenizer(drafter, dtype, self.mesh, drafter=True, quantize=quantize_drafter)
            drafter_tokenizer = drafter_tokenizer or loaded
        self.tokenizer = tokenizer
        self.target = sharding.spread(target, self.mesh, kernel=attention)
        self.drafter = None if drafter is None else sharding.spread(drafter, self.mesh, kernel=attention, drafter=True)
        if quantize is not None:
            self.target = quantization.quantized(self.target, quantize)
        if quantize_drafter is not None:
            self.drafter = quantization.quantized(self.drafter, quantize_drafter)
        self.vocab = target.config.vocab_size
        self.eos_token_ids = target.config.eos_token_ids
        if isinstance(drafter, Decoder) and not borrows_tokens(drafter.config, target.config):
            self.vocab = check_same_tokens(
                tokenizer,
                drafter_tokenizer,
                target.config,
                drafter.config,
                target_name=self.target_name,
                drafter_name=self.drafter_name,
            )
        context = target.config.max_position_embeddings
        if isinstance(drafter, Decoder):
            context = min(context, drafter.config.max_position_embeddings)
        if max_seq_len is not None and not 2 <= max_seq_len <= context:
            raise OptionError(f"--max-seq-len {max_seq_len}: must be between 2 and the context of {context}")
        self.max_seq_len = max_seq_len or context
        self.platform = jax.default_backend()
        if tuned is not None:
            check_models(tuned, self.target, self.drafter, (self.target_name, self.drafter_name))
            here = {"platform": self.platform, "device": str(jax.devices()[0].device_kind), "cores": os.cpu_count()}
            if others := other_machine(tuned, here):
                logger.warning("%s: tuned on another machine, %s: tune again here", tuned.path, ", ".join(others))
            self.decoding = tuned.decoding
        self.load_s = time.perf_counter() - start
        self.corpus: Corpus | None = None
        self._programs = Executables()
        self._checked_widths: dict[int, dict[int, bool]] = {}

    # -- inputs ------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string (one user turn, if the tokenizer has a chat template), messages, or ids.

        Raises:
          PromptError: nothing to encode with, an empty prompt, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise PromptError("the prompt is not valid UTF-8 text")
            tokenizer = self._need_tokenizer()
            if getattr(tokenizer, "chat_template", None):
                return self.encode([{"role": "user", "content": prompt}])
            ids = tokenizer(prompt)["input_ids"]
        elif len(prompt) and isinstance(prompt[0], dict):
            tokenizer = self._need_tokenizer()
            if not getattr(tokenizer, "chat_template", None):
                raise PromptError(f"{self.target_name} has no chat template: give the prompt as text or token ids")
            ids = tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise PromptError("the prompt is empty")
        vocab = self.target.config.vocab_size
        for token in ids:
            if not 0 <= token < vocab:
                raise PromptError(f"token id {token} is outside the vocabulary of {vocab} of {self.target_name}")
        return list(ids)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise PromptError(f"{self.target_name} has no tokenizer: give token ids (--token-ids) instead of text")
        return self.tokenizer

    def _encode_all(self, prompts: Any) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self.encode(prompts)]
        if isinstance(prompts, (np.ndarray, jax.Array)):
            prompts = np.asarray(prompts).tolist()
        if not isinstance(prompts, Iterable):
            raise PromptError(f"prompts must be text, messages, token ids, or a list of them, got {prompts!r}")
        prompts = list(prompts)
        if not prompts:
            raise PromptError("the prompt is empty")
        first = prompts[0]
        single = isinstance(first, dict) or isinstance(first, (int, np.integer))
        return [self.encode(prompts)] if single else [self.encode(prompt) for prompt in prompts]

    # -- answers -----------------------------------------------------------------------------------------

    def generate(self, prompts: Any, config: GenerationConfig | None = None, **options: Any) -> list[Result]:
        """Answers one prompt or a batch, each whole answer in one dispatch.

        Args:
          prompts: a string, a list of strings, messages, a list of messages, ids, or a list of ids.
          config: the request; `options` replace single fields of it.

        Returns:
          One result a prompt, in order.

        Raises:
          ValueError: a bad option (`OptionError`) or prompt (`PromptError`).
        """
        *_, last = self._run(self._encode_all(prompts), self._config(config, options), stream=False)
        return last

    def stream(self, prompts: Any, config: GenerationConfig | None = None, **options: Any) -> Iterator[StreamEvent]:
        """Like `generate`, in slices of a few rounds: yields what became final after each."""
        encoded = self._encode_all(prompts)
        sent = [0] * len(encoded)
        texts = [""] * len(encoded)
        for news in self._run(encoded, self._config(config, options), stream=True):
            for index, item in enumerate(news):
                final = isinstance(item, Result)
                ids = item.output_ids if final else item
                text = None
                if self.tokenizer is not None:
                    whole = self._decode(ids)
                    # A token may end inside a character: hold back what is not yet one.
                    stable = whole if final else whole.rstrip("\ufffd")
                    text = stable[len(texts[index]) :] if stable.startswith(texts[index]) else ""
                    texts[index] += text
                if len(ids) > sent[index] or final:
                    yield StreamEvent(index, list(ids[sent[index] :]), text, item if final else None)
                sent[index] = len(ids)

    def _config(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        config = self._scheduled(dataclasses.replace(config or GenerationConfig(), **options))
        config.validate()
        if config.method not in METHODS and config.method != DIFFUSION_METHOD:
            raise OptionError(f"--method {config.method}: must be one of {', '.join([*METHODS, DIFFUSION_METHOD])}")
        check_acceptance(config)
        if config.steps is not None and config.method != "specdiff":
            raise OptionError(f"--steps {config.steps}: only --method specdiff has a number of denoising steps")
        if config.tree_budget and (config.method != "failfast" or config.schedule != "wide"):
            raise OptionError(
                f"--tree-budget {config.tree_budget}: only --method failfast (schedule wide) drafts trees"
            )
        return config

    def _scheduled(self, config: GenerationConfig) -> GenerationConfig:
        """The request with its schedule decided."""
        if config.schedule is not None:
            return config
        return dataclasses.replace(config, schedule=self.decoding.get("schedule") or "wide")

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _run(self, prompts: list[list[int]], config: GenerationConfig, stream: bool) -> Iterator[list]:
        """Yields lists of output ids so far (streaming only), at last the list of results."""
        counts, compile_before = compile_counts(), self._programs.seconds
        job = self._diffusion_job(prompts, config) if config.method == DIFFUSION_METHOD else self._job(prompts, config)
        for program in job.prefill_programs:
            self._programs.wait(program)
        start = time.perf_counter()
        state = job.prefill()  # while the loop, the largest program, may still be compiling
        jax.block_until_ready(state)
        prefill_s = time.perf_counter() - start
        self._programs.wait(job.loop_program)
        compile_s = self._programs.seconds - compile_before
        syncs = 1

        decode_s = 0.0
        while True:
            start = time.perf_counter()
            # The first slice is one round: the first words should not wait for the next ones.
            state = job.advance(state, np.int32(job.slice if syncs > 1 else 1) if stream else _NO_LIMIT)
            ids, begin, end, finish = jax.device_get(job.snapshot(state))
            decode_s += time.perf_counter() - start
            syncs += 1
            if not (finish == RUNNING).any():
                break
            if stream:
                yield [ids[row, begin[row] : end[row]].tolist() for row in range(len(prompts))]
        outputs = [ids[row, begin[row] : end[row]].tolist() for row in range(len(prompts))]
        used = compile_counts().since(counts)
        times = {"compile_s": compile_s, "prefill_s": prefill_s, "decode_s": decode_s}
        yield self._results(config, prompts, outputs, finish, state, used, times, syncs)

    # -- draft and verify --------------------------------------------------------------------------------

    def build_drafter(self, config: GenerationConfig) -> Drafter:
        """The drafter of a method with the request's settings.

        Raises:
          ConfigError, OptionError: the method needs another kind of model than `drafter`.
        """
        config = self._scheduled(config)
        method = METHODS[config.method]
        model = self.drafter if method.model else None
        if config.lookup_min and config.method not in ("failfast", "lookup", "suffix"):
            raise OptionError(f"--lookup-min {config.lookup_min}: --method {config.method} looks nothing up")
        if config.min_gain and (config.method != "failfast" or config.schedule != "wide"):
            raise OptionError(f"--min-gain {config.min_gain}: only --method failfast (schedule wide) weighs its drafts")
        # Options that were tuned for one schedule mean nothing to the other.
        if config.method == "failfast" and config.schedule == (self.decoding.get("schedule") or "wide"):
            unset = {name: value for name, value in self.decoding.items() if getattr(config, name) is None}
            if (config.acceptance == "rejection" or config.tree_budget) and config.lookup_min is None:
                unset["lookup_min"] = 0  # neither samples nor alternatives come with given tokens
            if config.lookup_min == 0 or unset.get("lookup_min") == 0:
                unset.pop("min_gain", None)
            # A default gives way to the length that was asked for.
            if config.spec_len and unset.get("max_spec_len", config.spec_len) < config.spec_len:
                unset["max_spec_len"] = config.spec_len
            if config.max_spec_len and unset.get("spec_len", 0) > config.max_spec_len:
                unset["spec_len"] = config.max_spec_len
            config = dataclasses.replace(config, **unset)
        if method.model and model is None:
            raise OptionError(f"--method {config.method}: needs --drafter, a model of kind {method.model!r}")
        if method.model == "diffusion" and isinstance(model, Decoder) and not model.config.is_diffusion:
            raise ConfigError(
                f"{self.drafter_name}: method {config.method} needs a block-diffusion drafter, "
                f"this is an autoregressive {model.config.model_type} (use --method ar)"
            )
        if method.model == "autoregressive" and (isinstance(model, BoundConditioned) or model.config.is_diffusion):
            raise ConfigError(
                f"{self.drafter_name}: method {config.method} needs an autoregressive drafter, "
                "this is a block-diffusion model (use --method failfast)"
            )
        if config.block_size and method.model == "diffusion":
            if isinstance(model, BoundConditioned):
                raise OptionError(f"--block-size {config.block_size}: {self.drafter_name} has no blocks of its own")
            model = with_block_size(model, config.block_size)
        drafter = method.build(config, model, self.vocab, self.platform)
        if self.corpus is None:
            return drafter
        if self.corpus.tokens.max() >= self.target.config.vocab_size:
            raise PromptError(f"the corpus holds token id {self.corpus.tokens.max()}, which {self.target_name} lacks")
        return drafter.with_corpus(self.corpus.tokens)

    def _plan(self, drafter: Drafter, exact: bool, batch: int) -> round.Plan:
        if not exact or self.platform != "cpu" or self.target.dtype != jnp.float32:
            return round.make_plan(drafter, platform=self.platform, exact=exact)
        # Float32 on CPU: most widths above 1 give bit-identical rows. Those that do not are left out.
        # The constant width is one of them: another method may have to fall back to it.
        candidates = {*round.cpu_ladder(drafter.max_draft + 1), *round.CPU_PREFILL_WIDTHS, round.EXACT_WIDTH} - {1}
        checked = self._checked_widths.setdefault(batch, {})
        unchecked = tuple(sorted(candidates - checked.keys()))
        if unchecked:
            fine = interchangeable_widths(self.target, unchecked, batch=batch)
            checked |= {width: width in fine for width in unchecked}
        widths = tuple(sorted(width for width in candidates if checked[width]))
        if (
            not checked[round.EXACT_WIDTH]
            or max(widths) <= drafter.max_draft
            or not set(widths) & set(round.CPU_PREFILL_WIDTHS)
        ):
            logger.warning("exact: rows differ between widths here; every step runs at %d rows", round.EXACT_WIDTH)
            widths = ()
        return round.make_plan(drafter, platform=self.platform, exact=True, interchangeable=widths)

    def _capacity(self, prompts: list[list[int]], max_new_tokens: int, longest_draft: int) -> int:
        longest = max(map(len, prompts))
        if longest >= self.max_seq_len:
            raise PromptError(
                f"the prompt of {longest} tokens does not fit: prompt and output together may have "
                f"{self.max_seq_len} tokens"
            )
        wanted = longest + max_new_tokens
        if wanted > self.max_seq_len:
            logger.warning(
                "prompt (%d) and max_new_tokens (%d) exceed the %d tokens there is room for: output may end early",
                longest,
                max_new_tokens,
                self.max_seq_len,
            )
        return min(_bucket(wanted + longest_draft + 1), self.max_seq_len)

    def _prompt_arrays(self, prompts: list[list[int]], capacity: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((len(prompts), capacity), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
        return tokens, np.asarray([len(ids) for ids in prompts], np.int32)

    def _sampling(self, config: GenerationConfig, batch: int) -> Sampling:
        return Sampling(
            temperature=np.full(batch, config.temperature, np.float32),
            top_k=np.full(batch, config.top_k, np.int32),
            top_p=np.full(batch, config.top_p, np.float32),
            seed=np.full(batch, config.seed, np.uint32),
            sequence=np.arange(batch, dtype=np.int32),
        )

    def _eos(self, config: GenerationConfig) -> np.ndarray:
        return np.asarray(round.pad_eos(() if config.ignore_eos else self.eos_token_ids), np.int32)

    def _keeper(self, target: Decoder, drafter: Any, batch: int) -> sharding.Keeper:
        """Keeps a state where it is while programs hand it on.

        Raises:
          OptionError: the batch does not divide over the data-parallel groups.
        """
        if self.mesh is not None:
            sharding.check_batch(batch, self.mesh)
        return sharding.Keeper(target, drafter)

    def _job(self, prompts: list[list[int]], config: GenerationConfig) -> _Job:
        if self.target.config.is_diffusion:
            raise ConfigError(
                f"{self.target_name}: a block-diffusion model cannot verify drafts; name an autoregressive target, "
                f"or let it write on its own with --method {DIFFUSION_METHOD}"
            )
        drafter = self.build_drafter(config)
        batch = len(prompts)
        keep = self._keeper(self.target, self.drafter, batch)
        plan = self._plan(drafter, config.exact, batch)
        capacity = self._capacity(prompts, config.max_new_tokens, drafter.max_draft)
        tokens, lengths = self._prompt_arrays(prompts, capacity)
        inputs = {
            "tokens": tokens,
            "prompt_length": lengths,
            "max_new_tokens": np.full(batch, config.max_new_tokens, np.int32),
            "eos": self._eos(config),
            "sampling": self._sampling(config, batch),
        }

        def init(target, drafter, inputs):
            return keep(round.init_state(target, drafter, capacity=capacity, plan=plan, **inputs))

        static = dataclasses.replace(
            config,
            max_new_tokens=1,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            tau=0.0,
            min_gain=float(bool(config.min_gain)),  # with one, features wait to be stored
            threshold=None,
            ignore_eos=False,
        )
        models = (self.target, drafter)
        shapes = tuple(map(np.shape, jax.tree.leaves(drafter)))
        key = (static, plan, batch, capacity, shapes)
        empty = keep.shapes(init, *models, inputs)
        calls = round.prefill_schedule(max(map(len, prompts)), drafter, plan, empty.tokens.shape[1])
        kinds = list(dict.fromkeys((call.width, call.parts) for call in calls))

        def chunk(width, parts):
            return lambda t, d, s, at: keep(round.prefill_chunk(t, d, s, at, width=width, parts=parts))

        def rounds(target, drafter, state, most):
            return keep(round.generate(target, drafter, state, most, plan=plan))

        loop, *starting = self._programs.start(
            Program((*key, "rounds"), rounds, (*models, empty, np.int32(0)), donate=(2,)),
            Program((*key, "init"), init, (*models, inputs)),
            *(
                Program((*key, "prefill", *kind), chunk(*kind), (*models, empty, np.int32(0)), donate=(2,))
                for kind in kinds
            ),
        )

        def prefill():
            make_state, *chunks = (future.result() for future in starting)
            by_kind = dict(zip(kinds, chunks))
            state = make_state(*models, inputs)
            for call in calls:
                state = by_kind[call.width, call.parts](*models, state, np.int32(call.start))
            return state

        return _Job(
            prefill_programs=starting,
            loop_program=loop,
            prefill=prefill,
            advance=lambda state, most: loop.result()(*models, state, most),
            snapshot=lambda s: (s.tokens, s.prompt_length, s.length, s.finish),
            slice=STREAM_ROUNDS,
        )

    # -- block diffusion on its own ----------------------------------------------------------------------

    def _diffusion_job(self, prompts: list[list[int]], config: GenerationConfig) -> _Job:
        model = self.target
        if not model.config.is_diffusion:
            raise ConfigError(f"{self.target_name}: method {DIFFUSION_METHOD} needs a block-diffusion model")
        if config.block_size:
            model = with_block_size(model, config.block_size)
        block, small = model.config.block_size, config.small_block_size
        if config.max_new_tokens < block:
            raise OptionError(
                f"--max-new-tokens {config.max_new_tokens}: must be at least the block size {block} for "
                f"--method {DIFFUSION_METHOD}"
            )
        if block % small:
            raise OptionError(f"--small-block-size {small}: must divide the block size {block}")
        blocks = config.max_new_tokens // block
        longest = max(map(len, prompts))
        capacity = self._capacity(prompts, blocks * block + 1, block)
        batch = len(prompts)
        keep = self._keeper(model, None, batch)
        tokens, lengths = self._prompt_arrays(prompts, capacity)
        # What fits, in whole blocks behind each prompt's own.
        fitting = np.maximum((capacity - 1) // block - lengths // block, 0)
        if not fitting.all():
            raise PromptError(f"no whole block of {block} fits behind the prompt within {capacity} tokens")
        inputs = {
            "tokens": tokens,
            "prompt_length": lengths,
            "max_blocks": np.minimum(blocks, fitting).astype(np.int32),
            "eos": self._eos(config),
            "sampling": self._sampling(config, batch),
        }

        def init(model, inputs):
            return keep(dllm.init_state(model, capacity=capacity, block_rounds=capacity // block + 1, **inputs))

        key = (DIFFUSION_METHOD, block, small, config.block_cache, batch, capacity)
        empty = keep.shapes(init, model, inputs)
        width = round.round_up(128, block)
        cached = (longest - 1) // block * block

        def chunk_of(model, state, at):
            return keep(dllm.prefill_chunk(model, state, at, width=width))

        def passes(model, state, threshold, most):
            state = dllm.generate(model, state, threshold, most, small_block=small, block_cache=config.block_cache)
            return keep(state)

        loop, *starting = self._programs.start(
            Program((*key, "passes"), passes, (model, empty, np.float32(0), np.int32(0)), donate=(1,)),
            Program((*key, "init"), init, (model, inputs)),
            *([Program((*key, "prefill"), chunk_of, (model, empty, np.int32(0)), donate=(1,))] if cached else []),
        )
        threshold = np.float32(1.0 if config.threshold is None else config.threshold)

        def prefill():
            make_state, *chunks = (future.result() for future in starting)
            state = make_state(model, inputs)
            for at in range(0, cached, width):
                state = chunks[0](model, state, np.int32(at))
            return state

        return _Job(
            prefill_programs=starting,
            loop_program=loop,
            prefill=prefill,
            advance=lambda state, most: loop.result()(model, state, threshold, most),
            snapshot=lambda s: (s.text, s.prompt_length, s.end, s.finish),
            slice=2 * STREAM_ROUNDS,
        )

    # -- results -----------------------------------------------------------------------------------------

    def _results(
        self,
        config: GenerationConfig,
        prompts: list[list[int]],
        outputs: list[list[int]],
        finish: np.ndarray,
        state: Any,
        used: CompileCounts,
        times: dict[str, float],
        syncs: int,
    ) -> list[Result]:
        host = jax.device_get(state.block_passes if config.method == DIFFUSION_METHOD else state.log)
        syncs += 1
        results = []
        for row, (prompt, output) in enumerate(zip(prompts, outputs)):
            if config.method == DIFFUSION_METHOD:
                rounds = self._blocks(config, len(prompt), output, host[row])
                target_passes = int(sum(r.passes for r in rounds)) + int(len(prompt) >= self._block(config))
                drafter_passes = 0
            else:
                rounds = _rounds(host, row, output)
                drafter_passes = sum(r.passes for r in rounds)
                target_passes = int(host.target_passes) if len(prompts) == 1 else len(rounds)
            results.append(
                Result(
                    prompt_ids=list(prompt),
                    output_ids=output,
                    text=self._decode(output) if self.tokenizer is not None else None,
                    finish_reason=_FINISH_REASONS[int(finish[row])],
                    method=config.method,
                    stats=Stats(
                        rounds=len(rounds),
                        drafted=sum(len(r.drafted) for r in rounds),
                        accepted=sum(r.accepted for r in rounds),
                        drafter_passes=drafter_passes,
                        target_passes=target_passes,
                        load_s=self.load_s,
                        tokens_per_s=len(output) / times["decode_s"],
                        compiles=used.compiles,
                        cache_hits=used.cache_hits,
                        host_syncs=syncs,
                        **times,
                    ),
                    rounds=rounds,
                )
            )
        return results

    def _block(self, config: GenerationConfig) -> int:
        return config.block_size or self.target.config.block_size

    def _blocks(self, config: GenerationConfig, prompt: int, output: list[int], passes: np.ndarray) -> list[Round]:
        """A block-diffusion answer by blocks: each emits its own tokens and the next block's first."""
        block = self._block(config)
        rounds, done = [], 0
        first_end = prompt // block * block + block + 1 - prompt
        while done < len(output):
            end = min(first_end + len(rounds) * block, len(output))
            rounds.append(Round([], [], 0, output[done:end], int(passes[len(rounds)])))
            done = end
        return rounds


def _rounds(log: round.RoundLog, row: int, output: list[int]) -> list[Round]:
    rounds, done = [], 0
    for index in range(int(log.rounds[row])):
        length, emitted = int(log.draft_length[row, index]), int(log.emitted[row, index])
        rounds.append(
            Round(
                drafted=log.drafted[row, index, :length].tolist(),
                confidence=log.confidence[row, index, :length].tolist(),
                accepted=int(log.accepted[row, index]),
                emitted=output[done : done + emitted],
                passes=int(log.passes[row, index]),
            )
        )
        done += emitted
    return rounds


def _name(model: Any, role: str) -> str:
    return f"the {role} model" if model is None or isinstance(model, (Decoder, BoundConditioned)) else str(model)
