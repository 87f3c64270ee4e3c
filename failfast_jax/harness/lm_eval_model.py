"""The model `failfast_jax` of the lm-evaluation-harness: answers from an engine's rows, scores from its target."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.utils
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from failfast_jax import distributed, numerics
from failfast_jax.command import meant
from failfast_jax.config import GenerationConfig
from failfast_jax.decoding.accept import argmax
from failfast_jax.defaults import load_pair
from failfast_jax.drafters import all_options
from failfast_jax.engine import FailFast
from failfast_jax.engine_flags import default_method
from failfast_jax.errors import OptionError
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.progress import note
from failfast_jax.serving.request_queue import Queue
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.templates import render

SHORTEST = 64
"""Texts are padded to this many tokens, or twice, four times, ... as many: one program each."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, and of what is scored behind it."""

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of an answer's limit; the first that is given counts, as in the harness."""
OTHER_NUMBERS = ("temperature", "top_p", "top_k", "seed")
SERVED = ("until", "do_sample", *OTHER_NUMBERS, *LIMITS)
"""Arguments of a request for an answer."""
_ONE, _ZERO = (1,), (0,)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "typical_p"), _ONE),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"), _ONE),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "diversity_penalty", "no_repeat_ngram_size"), _ZERO),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "min_new_tokens", "min_tokens", "min_length"), _ZERO),
    **{"early_stopping": (False,), "use_cache": (True, False)},
}
"""Arguments that are not served, with the values that change nothing; None is one for all of them."""


def check_names(options: Iterable[str]) -> None:
    """Raises OptionError: an argument that neither a model nor any method takes."""
    own = [name for name in inspect.signature(FailFastLM.__init__).parameters if name not in ("self", "options")]
    requests = [field.name for field in dataclasses.fields(GenerationConfig)]
    known = {*own, *requests, *(name for method in all_options().values() for name in method.names())}
    for name in options:
        if name not in known:
            raise OptionError(f"--model_args {name}=...: no such argument{meant(name, known)}")


def sampling(settings: Mapping[str, Any], default_limit: int) -> dict[str, Any]:
    """A request's arguments as `Queue.submit` takes them; `max_new_tokens` may be 0.

    Raises:
      OptionError: an argument that would change the text and is not served, or a value of another kind or range.
    """
    for name, value in settings.items():
        if name in SERVED or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
            continue
        if name in NEUTRAL:
            advice = f"; leave it out, or give {NEUTRAL[name][0]}, which changes nothing"
        else:
            advice = meant(name, {*SERVED, *NEUTRAL}) or f"; these are: {', '.join(SERVED)}"
        raise OptionError(f"generation argument {name}={value!r}: not served{advice}")
    values = {name: value for name, value in settings.items() if value is not None}
    until, sampled = values.get("until", []), values.get("do_sample")
    try:
        stop = [until] if isinstance(until, str) else list(filter(None, until))
        if sampled not in (None, True, False) or not all(isinstance(text, str) for text in stop):
            raise ValueError("do_sample must be true or false, and until strings")
        numbers = {name: _number(name, values[name]) for name in (*LIMITS, *OTHER_NUMBERS) if name in values}
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"generation arguments {dict(settings)!r}: {error}") from None
    limit = next((numbers[name] for name in LIMITS if name in numbers), default_limit)
    if limit < 0:
        raise OptionError(f"generation argument max_gen_toks={limit}: must not be negative")
    temperature = numbers.get("temperature", 1.0 if sampled else 0.0)
    options = {
        "temperature": temperature if sampled or sampled is None else 0.0,
        "top_p": numbers.get("top_p", 1.0),
        "top_k": max(numbers.get("top_k", 0), 0),
        "seed": numbers.get("seed", 0),
    }
    GenerationConfig(**options).validate()
    return {"max_new_tokens": limit, "stop": stop, **options}


def _number(name: str, value: Any) -> int | float:
    """The number that a task or a command line gives, perhaps as text."""
    number = float(value) if name in ("temperature", "top_p") else int(value)
    if isinstance(value, bool) or number != float(value):
        raise ValueError(f"{name} must be {'a number' if isinstance(number, float) else 'an integer'}")
    return number


def of_repeat(seed: int, repeat: int) -> int:
    """The seed of a question's n-th answer: the harness asks the same n times, and wants n samples."""
    return int(np.random.SeedSequence([seed, repeat]).generate_state(1)[0]) if repeat and 0 <= seed < 2**32 else seed


def scores(
    target: Decoder, ids: Int[ArrayLike, "B L"], following: Int[ArrayLike, "B L"]
) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
    """Of the token that follows each: its log-probability behind those before it, and whether it is the most probable.

    A causal model's rows see no padding that comes behind them.
    """
    logits = target.forward(ids)
    own = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1), argmax(logits) == following


MODEL, SCORE, ANSWER = "model", "score", "answer"
"""What the first of several processes tells the others to compute with it."""


def tell(what: str | None, value: Any = None) -> None:
    """Tells the processes that `follow` what comes next; None: that is all."""
    if distributed.speaks():
        distributed.agreed([what, value])


def follow() -> None:
    """What other processes than the first do: they compute what its model computes, and know nothing of the harness.

    Raises:
      ValueError: the model could not be made here, though the first process has it.
    """
    model, error = None, None
    while (told := distributed.agreed(None))[0] is not None:
        what, value = told
        if error is not None:
            raise error
        if what == MODEL:
            try:
                model = FailFastLM(**value)
            except ValueError as raised:  # the first process says the same, and ends
                error = raised
        elif what == SCORE:
            model.score(value)
        else:
            with model.open_queue() as queue:
                queue.follow()


@register_model("failfast_jax")
class FailFastLM(TemplateLM):
    """An engine as the harness sees it. These are what `--model_args` takes:

    Args:
      target: as in `python -m failfast_jax.generate`, as are the next two; without any, the default pair.
      drafter: of a method that drafts with a model.
      method: None: the drafter's own.
      batch: rows of generation, and texts that are scored together. `--batch_size` is the same.
      context: most tokens of a text, or of a prompt and its answer; None: what the model has, at most 2048.
      max_gen_toks: tokens of an answer where a task names no limit.
      dtype: of loaded weights.
      tensor_parallel: devices that share each layer.
      max_batch_size: the harness' own, without effect.
      device: likewise; JAX chooses it.
      engine: instead of `target` and `drafter`.
      options: of the method, and `exact`.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(
        self,
        target: str | None = None,
        drafter: str | None = None,
        method: str | None = None,
        *,
        batch: int | None = None,
        batch_size: int | str | None = None,
        context: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        tensor_parallel: int = 1,
        max_batch_size: Any = None,
        device: Any = None,
        engine: FailFast | None = None,
        **options: Any,
    ):
        super().__init__()
        if engine is None:
            common = {"max_gen_toks": max_gen_toks, "dtype": dtype, "tensor_parallel": tensor_parallel}
            own = {"method": method, "batch": batch, "batch_size": batch_size, "context": context}
            tell(MODEL, {"target": target, "drafter": drafter, **own, **common, **options})
        if isinstance(batch_size, str) and not batch_size.isdigit():
            raise OptionError(f"--batch_size {batch_size}: must be a number; name one, or batch=n in --model_args")
        self.batch = batch or int(batch_size or 1)
        refuse_diffusion(method)
        check_names(options)
        method = method or (None if engine else default_method(target, drafter))
        self.engine = engine or load_pair(target, drafter, method=method, dtype=dtype, tensor_parallel=tensor_parallel)
        if self.engine.tokenizer is None:
            raise OptionError(f"{self.engine.target_name}: has no tokenizer, and the harness speaks text")
        self.tokenizer, self.max_gen_toks = self.engine.tokenizer, max_gen_toks
        self.max_length = context or min(self.engine.max_seq_len, 2048)
        self._config = GenerationConfig(method, **options)

    @functools.cached_property
    def queue(self) -> Queue:
        """What generates where this is the only process; made when a task first asks for it."""
        return self.open_queue()

    def open_queue(self) -> Queue:
        """One that generates, and is to be closed."""
        return Queue(
            self.engine, self._config, batch=self.batch, capacity=self.max_length, waiting=2**30, least_reuse=32
        )

    # Text.

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.engine.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The id that a text without a beginning is scored behind."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """What the harness files cached requests under."""
        return str(self.engine.target_name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text as it is. Special tokens are added as the tokenizer does, unless the text begins with one."""
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            add_special_tokens = not (begin and string.startswith(begin))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return render(chat_history, self.tokenizer, str(self.engine.target_name), **how)

    # Likelihoods.

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation of its context; that of an empty text is 0."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        places = [place for place, request in enumerate(requests) if request.args[1]]
        pairs = [(requests[place].args, *self._encode_pair(*requests[place].args)) for place in places]
        for place, score in zip(places, self._loglikelihood_tokens(pairs)):
            found[place] = score
        return found

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of a context and of its continuation, which takes the context's last spaces.

        Where a token would span the join, the continuation is encoded alone, lest a part of it be scored, or nothing.
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
        """Log-probability of each text behind its context, and whether each of its tokens is the most probable one.

        Contexts lose their beginnings where the two together are longer than there is room for.

        Raises:
          OptionError: a text, or a context, without a token, or a text that is too long by itself.
        """
        for context, text in pairs:
            if not context or not 0 < len(text) <= self.max_length:
                raise OptionError(f"a text of {len(text)} tokens behind {len(context)}: must be 1 to {self.max_length}")
        if cut := sum(len(context) + len(text) > self.max_length + 1 for context, text in pairs):
            note(f"harness: contexts that lost their beginnings: {cut} (context={self.max_length} in --model_args)")
        tell(SCORE, pairs)
        found: dict[int, tuple[float, bool]] = {}
        for batch in self._batches([len(context) + len(text) for context, text in pairs]):
            texts = [[*pairs[index][0], *pairs[index][1]][-self.max_length - 1 :] for index in batch]
            width = SHORTEST
            while width + 1 < max(map(len, texts)):
                width *= 2
            ids = np.zeros((self.batch, width + 1), np.int32)
            for row, text in enumerate(texts):
                ids[row, : len(text)] = text
            logprobs, best = self._scored(ids)
            for row, index in enumerate(batch):
                own = slice(len(texts[row]) - 1 - len(pairs[index][1]), len(texts[row]) - 1)
                found[index] = float(logprobs[row, own].sum(dtype=np.float64)), bool(best[row, own].all())
        return [found[index] for index in range(len(pairs))]

    def _scored(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        args = (self.engine.target, ids[:, :-1], ids[:, 1:])
        program = self.engine.runtime.compile(scores, *args)
        with numerics.defaults():
            return jax.device_get(jax.tree.map(whole, program(*args)))

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of texts of about the same length, the longest first: memory runs out at once or not at all."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        for at in range(0, len(order), self.batch):
            yield order[at : at + self.batch]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        found = self.score([(context, text) for _, context, text in requests])
        for (texts, *_), one in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", texts, one)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context where they are longer."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = lm_eval.utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            for window in map(lm_eval.utils.make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self.score(pairs)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Answers.

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings."""
        if distributed.alone():
            texts = self._answered(self.queue, requests)
        else:
            tell(ANSWER)
            with self.open_queue() as queue:  # its end is where the others go on
                texts = self._answered(queue, requests)
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _answered(self, queue: Queue, requests: Any) -> list[str]:
        """Texts; all requests are checked before the first is computed."""
        asked: list[tuple[list[int], dict[str, Any]]] = []
        repeats: Counter[str] = Counter()
        for request in requests:
            context, settings = request.args
            options = sampling(settings, self.max_gen_toks)
            same = repr((context, sorted(settings.items())))
            options["seed"] = of_repeat(options["seed"], repeats[same])
            repeats[same] += 1
            asked.append((self.tok_encode(context) or [self.prefix_token_id], options))
        self._fit(asked)
        answers = [queue.submit(ids, **options) if options["max_new_tokens"] else None for ids, options in asked]
        return ["" if answer is None else answer.result().text for answer in answers]

    def _fit(self, asked: list[tuple[list[int], dict[str, Any]]]) -> None:
        """Makes prompts and answers fit the context, and says so: a prompt stays whole as long as one token fits behind
        it, and the answer is shorter; of a longer prompt the end stays, and at least half of the context."""
        shorter, cut = [], 0
        for ids, options in asked:
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
