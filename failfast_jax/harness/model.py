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
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs

from failfast_jax.decoding.picking import argmax
from failfast_jax.drafters import all_options, resolve
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig, common_fields
from failfast_jax.load_options import LoadOptions
from failfast_jax.models.sharding import whole
from failfast_jax.models.transformer import Decoder
from failfast_jax.serving import Queue
from failfast_jax.serving.serve_options import NEUTRAL, refuse_diffusion
from failfast_jax.template_rendering import render
from failfast_jax.util import numerics
from failfast_jax.util.command_line import did_you_mean
from failfast_jax.util.compilation import Program
from failfast_jax.util.progress import note

SHORTEST = 64
"""Texts are padded to this many tokens times a power of two: one program per width."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, and of the text after it that is scored."""

LOADING = {field.name for field in dataclasses.fields(LoadOptions) if "option" in field.metadata}
REQUEST = {field.name for field in common_fields()} | {n for options in all_options().values() for n in options.names()}
OF_HARNESS = {"batch_size", "max_batch_size", "device"}
"""Arguments that the harness adds; the last two have no effect."""
SERVED = ("until", "do_sample", "max_gen_toks", "temperature", "top_p", "top_k", "seed")
"""Arguments of a request for an answer; the harness knows other names of `max_gen_toks`."""


def sampling(settings: Mapping[str, Any], default_limit: int) -> dict[str, Any]:
    """A request's arguments as `Queue.submit` takes them; `max_new_tokens` may be 0.

    Raises:
      OptionError: an argument that would change the text and is not served, or a value of another kind or range.
    """
    try:
        values = normalize_gen_kwargs({n: v for n, v in settings.items() if v is not None}, default_limit)
    except ValueError as error:
        raise OptionError(f"generation arguments {dict(settings)!r}: {error}") from None
    for name, value in values.items():
        if name not in SERVED and value not in NEUTRAL.get(name, []):
            remedy = did_you_mean(name, SERVED) or f"; these are: {', '.join(SERVED)}"
            raise OptionError(f"generation argument {name}={value!r}: not served{remedy}")
    limit, stop = values["max_gen_toks"], [text for text in values["until"] if text != ""]
    if limit < 0 or not all(isinstance(text, str) for text in stop) or not isinstance(values["do_sample"], bool):
        rule = "max_gen_toks must not be negative, until must be strings, do_sample true or false"
        raise OptionError(f"generation arguments {dict(settings)!r}: {rule}")
    options = {name: values[name] for name in ("temperature", "top_p", "top_k", "seed") if name in values}
    if values["do_sample"]:
        options.setdefault("temperature", 1.0)
    options["top_k"] = max(options.get("top_k", 0), 0)  # -1 keeps all in other engines
    GenerationConfig(**options).validate()
    return {"max_new_tokens": limit, "stop": stop, **options}


def scores(
    target: Decoder, ids: Int[ArrayLike, "B L"], following: Int[ArrayLike, "B L"]
) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
    """Log-probability of each following token, and whether it is the most probable one.

    Padding after a text changes nothing: a causal model's rows do not see it.
    """
    logits = target.forward(ids)
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), argmax(logits, execution=target.execution) == following


@register_model("failfast_jax")
class FailFastLM(TemplateLM):
    """An engine as the harness sees it. The arguments are those of `--model_args`.

    Args:
      target: as in `python -m failfast_jax.generate`.
      drafter: likewise.
      engine: instead of both.
      batch: rows of generation, and texts that are scored together; None: the harness' `--batch_size`.
      context: maximum tokens of a text, or of a prompt and its answer; None: the models' limit, at most 2048.
      max_gen_toks: tokens of an answer if a task sets no limit.
      options: fields of `LoadOptions` and `GenerationConfig`, and options of the method.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(
        self,
        target: str | None = None,
        drafter: str | None = None,
        *,
        engine: FailFast | None = None,
        batch: int | None = None,
        context: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,
    ):
        super().__init__()
        batch = batch or options.pop("batch_size", None) or 1
        if not str(batch).isdigit():
            raise OptionError(f"--batch_size {batch}: must be a number")
        known = {"target", "drafter", "batch", "context", "max_gen_toks", *LOADING, *REQUEST}
        for name in options.keys() - known - OF_HARNESS:
            raise OptionError(f"--model_args {name}=...: no such argument{did_you_mean(name, known)}")
        loading = LoadOptions(needs_tokenizer=True, **{name: options[name] for name in LOADING & options.keys()})
        refuse_diffusion(loading.method)
        request = {name: options[name] for name in REQUEST & options.keys()}
        self._config = resolve(GenerationConfig(loading.method, **request))
        self.engine = engine or FailFast.load(target, drafter, loading)
        self.batch = int(batch)
        self.tokenizer, self.max_gen_toks = self.engine.tokenizer, max_gen_toks
        self.max_length = context or min(self.engine.max_seq_len, 2048)

    @functools.cached_property
    def queue(self) -> Queue:
        """The queue, opened by the first task that generates."""
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
        """A conversation as text; without a generation prompt it ends with the answer's beginning, its last message."""
        *turns, last = [*chat_history, {"content": ""}] if add_generation_prompt else chat_history
        text = render(turns, self.tokenizer, str(self.engine.target_name), add_generation_prompt=True)
        return text + last["content"]

    # Likelihoods.

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids as the harness encodes them; if a token spans the join, the continuation is encoded alone, as otherwise
        only a part of it would be scored."""
        ids, text = super()._encode_pair(context, continuation)
        if not text or [*ids, *text] != self.tok_encode(context + continuation):
            spaces = context[len(context.rstrip()) :]
            text = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return ids, text

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each text after its context, which has a token, and whether each of its tokens is the most
        probable one.

        A context loses its beginning if the two together exceed the room.

        Raises:
          OptionError: a text that is too long by itself.
        """
        if (longest := max((len(text) for _, text in pairs), default=0)) > self.max_length:
            raise OptionError(f"a text of {longest} tokens is to be scored: at most {self.max_length} (context=n)")
        if cut := sum(len(context) + len(text) > self.max_length + 1 for context, text in pairs):
            note(f"harness: contexts that lost their beginnings: {cut} (context={self.max_length} in --model_args)")
        results = [(0.0, True)] * len(pairs)
        # Texts of similar length share a batch; the longest come first, so that memory runs out at once or never.
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        for start in range(0, len(order), self.batch):
            indices = order[start : start + self.batch]
            texts = [[*pairs[index][0], *pairs[index][1]][-self.max_length - 1 :] for index in indices]
            width = max(SHORTEST, 1 << (max(map(len, texts)) - 2).bit_length())
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
        return results

    def _scores(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        args = (self.engine.target, ids[:, :-1], ids[:, 1:])
        [program] = self.engine.runtime.programs.start(Program(scores, args))
        with numerics.defaults():
            return jax.device_get(jax.tree.map(whole, program(*args)))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        # A context of spaces alone, which the harness gives to the text, is empty here.
        results = self.score([(context or [self.prefix_token_id], text) for _, context, text in requests])
        for (texts, *_), result in zip(requests, results):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context if they are longer."""
        texts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = lm_eval.utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            texts.append([lm_eval.utils.make_disjoint_window(window) for window in windows])
        results = iter(self.score([pair for pairs in texts for pair in pairs]))
        totals = [sum((next(results)[0] for _ in pairs), 0.0) for pairs in texts]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Answers.

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings; all requests are checked before the first is computed.

        A prompt that leaves room for a token stays whole, and the answer is shorter; a longer prompt keeps its end, in
        at least half of the context.
        """
        submissions: list[tuple[list[int], dict[str, Any]]] = []
        repeats: Counter[str] = Counter()
        shortened = 0
        for context, settings in (request.args for request in requests):
            options, ids = sampling(settings, self.max_gen_toks), self.tok_encode(context) or [self.prefix_token_id]
            key = repr((context, sorted(settings.items())))
            options.setdefault("seed", 0)
            if repeat := repeats[key]:  # the harness asks the same n times for n samples
                options["seed"] = int(np.random.SeedSequence([options["seed"], repeat]).generate_state(1)[0])
            repeats[key] += 1
            limit = options["max_new_tokens"]
            least = 1 if len(ids) < self.max_length else min(limit, self.max_length // 2)
            room = {"min_gen_toks": least, "shrink_gen_toks": True, "verbose": False}
            fitted, options["max_new_tokens"] = maybe_truncate(ids, limit, self.max_length, **room)
            shortened += (len(fitted), options["max_new_tokens"]) != (len(ids), limit)
            submissions.append((fitted, options))
        if shortened:
            advice = f"context={self.max_length} in --model_args is tokens of both"
            note(f"harness: prompts or answers that were cut to fit: {shortened} ({advice})")
        answers = [
            self.queue.submit(ids, **options) if options["max_new_tokens"] else None for ids, options in submissions
        ]
        texts = ["" if answer is None else answer.result().text for answer in answers]
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts
