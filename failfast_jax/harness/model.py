"""The model `failfast_jax` of the lm-evaluation-harness: answers from an engine's rows, scores from its target."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.utils
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from failfast_jax.decoding.picking import argmax
from failfast_jax.drafters import all_options
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig, common_fields
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.serving import Queue
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.template_rendering import render
from failfast_jax.util import numerics, processes
from failfast_jax.util.command_line import did_you_mean
from failfast_jax.util.progress import note

SHORTEST = 64
"""Texts are padded to this many tokens times a power of two: one program per width."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, and of the text after it that is scored."""

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of an answer's limit; the first one present counts, as in the harness."""
SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "seed": int}
SERVED = ("until", "do_sample", *SAMPLING, *LIMITS)
"""Arguments of a request for an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "diversity_penalty", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "min_new_tokens", "min_tokens", "min_length"), (0,)),
    **{"early_stopping": (False,), "use_cache": (True, False)},
}
"""Arguments that are not served, with the values that change nothing; for each of them None is another one."""


def sampling(settings: Mapping[str, Any], default_limit: int) -> dict[str, Any]:
    """A request's arguments as `Queue.submit` takes them; `max_new_tokens` may be 0.

    Raises:
      OptionError: an argument that would change the text and is not served, or a value of another kind or range.
    """
    for name, value in settings.items():
        if name in SERVED or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
            continue
        if name in NEUTRAL:
            remedy = f"; leave it out, or give {NEUTRAL[name][0]}, which changes nothing"
        else:
            remedy = did_you_mean(name, {*SERVED, *NEUTRAL}) or f"; these are: {', '.join(SERVED)}"
        raise OptionError(f"generation argument {name}={value!r}: not served{remedy}")
    values = {name: value for name, value in settings.items() if value is not None}
    until, sampled = values.get("until", []), values.get("do_sample")
    try:
        stop = [until] if isinstance(until, str) else list(filter(None, until))
        if sampled not in (None, True, False) or not all(isinstance(text, str) for text in stop):
            raise ValueError("do_sample must be true or false, and until strings")
        numbers = {name: _number(name, values[name]) for name in (*LIMITS, *SAMPLING) if name in values}
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"generation arguments {dict(settings)!r}: {error}") from None
    limit = next((numbers[name] for name in LIMITS if name in numbers), default_limit)
    if limit < 0:
        raise OptionError(f"generation argument max_gen_toks={limit}: must not be negative")
    options = {
        "temperature": numbers.get("temperature", 1.0 if sampled else 0.0) if sampled in (None, True) else 0.0,
        "top_p": numbers.get("top_p", 1.0),
        "top_k": max(numbers.get("top_k", 0), 0),
        "seed": numbers.get("seed", 0),
    }
    GenerationConfig(**options).validate()
    return {"max_new_tokens": limit, "stop": stop, **options}


def _number(name: str, value: Any) -> int | float:
    """A number from a task or a command line, perhaps as text."""
    kind = SAMPLING.get(name, int)
    number = kind(value)
    if isinstance(value, bool) or number != float(value):
        raise ValueError(f"{name} must be {'a number' if kind is float else 'an integer'}")
    return number


def seed_of_repeat(seed: int, repeat: int) -> int:
    """The seed of a question's n-th answer: the harness asks the same n times for n samples."""
    return int(np.random.SeedSequence([seed, repeat]).generate_state(1)[0]) if repeat and 0 <= seed < 2**32 else seed


def scores(
    target: Decoder, ids: Int[ArrayLike, "B L"], following: Int[ArrayLike, "B L"]
) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
    """Log-probability of each following token, and whether it is the most probable one.

    Padding after a text changes nothing: a causal model's rows do not see it.
    """
    logits = target.forward(ids)
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), argmax(logits) == following


MODEL, SCORE, ANSWER = "model", "score", "answer"
"""Work that the first of several processes shares with the others."""


def tell(work: str | None, value: Any = None) -> None:
    """Tells the processes that `follow` the next work; None: there is none."""
    if processes.is_primary():
        processes.broadcast_from_primary([work, value])


def follow() -> None:
    """In processes other than the first: computes what its model computes, without the harness.

    Raises:
      ValueError: the model could not be made here, though the first process has it.
    """
    model, error = None, None
    while (message := processes.broadcast_from_primary(None))[0] is not None:
        work, value = message
        if error is not None:
            raise error
        if work == MODEL:
            try:
                model = FailFastLM(**value)
            except ValueError as refused:  # the first process refuses the same, and ends
                error = refused
        elif work == SCORE:
            model.score(value)
        else:
            with model.open_queue() as queue:
                queue.follow()


@dataclasses.dataclass(frozen=True)
class HarnessOptions:
    """Arguments in `--model_args` other than those of loading (`LoadOptions`) and of the request (`GenerationConfig`).

    Attributes:
      target, drafter: as in `python -m failfast_jax.generate`.
      batch: rows of generation, and texts that are scored together. `--batch_size` is the same.
      context: maximum tokens of a text, or of a prompt and its answer; None: the models' limit, at most 2048.
      max_gen_toks: tokens of an answer if a task sets no limit.
      max_batch_size, device: arguments of the harness without effect.
    """

    target: str | None = None
    drafter: str | None = None
    batch: int | None = None
    batch_size: int | str | None = None
    context: int | None = None
    max_gen_toks: int = 256
    max_batch_size: Any = None
    device: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, str) and not self.batch_size.isdigit():
            remedy = "must be a number; name one, or batch=n in --model_args"
            raise OptionError(f"--batch_size {self.batch_size}: {remedy}")


HARNESS = {field.name for field in dataclasses.fields(HarnessOptions)}
LOADING = {field.name for field in dataclasses.fields(LoadOptions) if "option" in field.metadata}
REQUEST = {field.name for field in common_fields()} | {n for options in all_options().values() for n in options.names()}


@register_model("failfast_jax")
class FailFastLM(TemplateLM):
    """An engine as the harness sees it.

    Args:
      engine: instead of `target` and `drafter`.
      arguments: fields of `HarnessOptions`, `LoadOptions` and `GenerationConfig`, and options of the method.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(self, *, engine: FailFast | None = None, **arguments: Any):
        super().__init__()
        if engine is None:
            tell(MODEL, arguments)
        known = HARNESS | LOADING | REQUEST
        for name in arguments.keys() - known:
            raise OptionError(f"--model_args {name}=...: no such argument{did_you_mean(name, known)}")
        args = HarnessOptions(**{name: arguments[name] for name in HARNESS & arguments.keys()})
        loading = LoadOptions(**{name: arguments[name] for name in LOADING & arguments.keys()})
        refuse_diffusion(loading.method)
        self._config = GenerationConfig(
            loading.method, **{name: arguments[name] for name in REQUEST & arguments.keys()}
        )
        self.engine = engine or FailFast.load(args.target, args.drafter, loading)
        if self.engine.tokenizer is None:
            raise OptionError(f"{self.engine.target_name}: has no tokenizer, and the harness speaks text")
        self.batch = args.batch or int(args.batch_size or 1)
        self.tokenizer, self.max_gen_toks = self.engine.tokenizer, args.max_gen_toks
        self.max_length = args.context or min(self.engine.max_seq_len, 2048)

    @functools.cached_property
    def queue(self) -> Queue:
        """The queue of a single process, opened by the first task that generates."""
        return self.open_queue()

    def open_queue(self) -> Queue:
        """Opens a queue, which the caller closes."""
        return Queue(self.engine, self._config, batch=self.batch, capacity=self.max_length, waiting=2**30)

    # Text.

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.engine.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """BOS id, or else the one that ends a text, in place of an empty context."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness' cached requests."""
        return str(self.engine.target_name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text as it is. Special tokens are added as the tokenizer does, unless the text begins with one."""
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return render(chat_history, self.tokenizer, str(self.engine.target_name), **ends)

    # Likelihoods.

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation of its context; that of an empty text is 0."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        indices = [index for index, request in enumerate(requests) if request.args[1]]
        pairs = [(requests[index].args, *self._encode_pair(*requests[index].args)) for index in indices]
        for index, score in zip(indices, self._loglikelihood_tokens(pairs)):
            results[index] = score
        return results

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of a context and of its continuation, which takes the context's last spaces.

        If a token spans the join, the continuation is encoded alone: otherwise only a part of it would be scored.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        alone = self.tok_encode(continuation, add_special_tokens=False)
        if not kept:
            begins = alone[:1] == [self.prefix_token_id]
            return (alone[:1], alone[1:]) if begins else ([self.prefix_token_id], alone)
        ids, both = self.tok_encode(kept), self.tok_encode(kept + continuation)
        joined = len(both) > len(ids) and both[: len(ids)] == ids
        return ids, both[len(ids) :] if joined else alone

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each text after its context, and whether each of its tokens is the most probable one.

        A context loses its beginning if the two together exceed the room.

        Raises:
          OptionError: a text, or a context, without a token, or a text that is too long by itself.
        """
        for context, text in pairs:
            if not context or not 0 < len(text) <= self.max_length:
                raise OptionError(f"a text of {len(text)} tokens after {len(context)}: must be 1 to {self.max_length}")
        if cut := sum(len(context) + len(text) > self.max_length + 1 for context, text in pairs):
            note(f"harness: contexts that lost their beginnings: {cut} (context={self.max_length} in --model_args)")
        tell(SCORE, pairs)
        results: dict[int, tuple[float, bool]] = {}
        # Texts of similar length share a batch; the longest come first, so that memory runs out at once or never.
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        for start in range(0, len(order), self.batch):
            indices = order[start : start + self.batch]
            texts = [[*pairs[index][0], *pairs[index][1]][-self.max_length - 1 :] for index in indices]
            width = SHORTEST
            while width + 1 < max(map(len, texts)):
                width *= 2
            ids = np.zeros((self.batch, width + 1), np.int32)
            for row, text in enumerate(texts):
                ids[row, : len(text)] = text
            # The pair ([7, 8], [9, 4]) is the row 7 8 9 4 0 ...; the program reads 7 8 9 0 ... and scores 8 9 4 0 ...
            # The scores of 9 and 4 are at positions 1 and 2: last = 3, span = slice(1, 3).
            logprobs, best = self._scores(ids)
            for row, index in enumerate(indices):
                last = len(texts[row]) - 1
                span = slice(last - len(pairs[index][1]), last)
                results[index] = float(logprobs[row, span].sum(dtype=np.float64)), bool(best[row, span].all())
        return [results[index] for index in range(len(pairs))]

    def _scores(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        args = (self.engine.target, ids[:, :-1], ids[:, 1:])
        program = self.engine.runtime.compile(scores, *args)
        with numerics.defaults():
            return jax.device_get(jax.tree.map(whole, program(*args)))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        results = self.score([(context, text) for _, context, text in requests])
        for (texts, *_), result in zip(requests, results):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context if they are longer."""
        pairs, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = lm_eval.utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs += map(lm_eval.utils.make_disjoint_window, windows)
            owners += [owner] * (len(pairs) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self.score(pairs)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Answers.

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings."""
        if processes.is_single_process():
            texts = self._texts(self.queue, requests)
        else:
            tell(ANSWER)
            with self.open_queue() as queue:  # the other processes continue after its end
                texts = self._texts(queue, requests)
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _texts(self, queue: Queue, requests: Any) -> list[str]:
        """Answers; all requests are checked before the first is computed."""
        submissions: list[tuple[list[int], dict[str, Any]]] = []
        repeats: Counter[str] = Counter()
        for request in requests:
            context, settings = request.args
            options = sampling(settings, self.max_gen_toks)
            key = repr((context, sorted(settings.items())))
            options["seed"] = seed_of_repeat(options["seed"], repeats[key])
            repeats[key] += 1
            submissions.append((self.tok_encode(context) or [self.prefix_token_id], options))
        self._fit(submissions)
        answers = [queue.submit(ids, **options) if options["max_new_tokens"] else None for ids, options in submissions]
        return ["" if answer is None else answer.result().text for answer in answers]

    def _fit(self, submissions: list[tuple[list[int], dict[str, Any]]]) -> None:
        """Makes prompts and answers fit the context, and reports it. A prompt that leaves room for a token stays whole,
        and the answer is shorter; a longer prompt keeps its end, in at least half of the context."""
        shorter, cut = [], 0
        for ids, options in submissions:
            limit, room = options["max_new_tokens"], self.max_length - len(ids)
            if limit and room < 1:
                room = min(limit, self.max_length // 2)
                del ids[: len(ids) + room - self.max_length]
                cut += 1
            if limit > room and limit:
                options["max_new_tokens"] = room
                shorter.append(room)
        advice = f"(context={self.max_length} in --model_args is tokens of both)"
        if shorter:
            note(f"harness: answers with less room than they ask for: {len(shorter)}, down to {min(shorter)} {advice}")
        if cut:
            note(f"harness: prompts that lost their beginnings: {cut} {advice}")
