"""The model `failfast_jax` of the lm-evaluation-harness: answers from an engine's rows, scores from its target."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval.utils
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from failfast_jax import distributed
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
from failfast_jax.serving.options import refuse_diffusion
from failfast_jax.serving.queue import Answer, Queue
from failfast_jax.templates import render

SHORTEST = 64
"""Texts are padded to this many tokens, or twice, four times, ... as many: one program each."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, and of what is scored behind it."""


def check_names(options: Iterable[str]) -> None:
    """Raises OptionError: an argument that neither a model nor any method takes."""
    own = [name for name in inspect.signature(FailFastLM.__init__).parameters if name not in ("self", "options")]
    requests = [field.name for field in dataclasses.fields(GenerationConfig)]
    known = {*own, *requests, *(name for method in all_options().values() for name in method.names())}
    for name in options:
        if name not in known:
            raise OptionError(f"--model_args {name}=...: no such argument{meant(name, known)}")


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

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each text behind its context, and whether each of its tokens is the most probable one.

        Contexts lose their beginnings where the two together are longer than there is room for.

        Raises:
          OptionError: a text, or a context, without a token, or a text that is too long by itself.
        """
        for context, text in pairs:
            if not context or not 0 < len(text) <= self.max_length:
                raise OptionError(f"a text of {len(text)} tokens behind {len(context)}: must be 1 to {self.max_length}")
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
        return jax.device_get(jax.tree.map(whole, self.engine.runtime.compile(scores, *args)(*args)))

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
        answers = [self._submitted(queue, request.args[0], dict(request.args[1])) for request in requests]
        return [answer.result().text for answer in answers]

    def _submitted(self, queue: Queue, context: str, settings: dict[str, Any]) -> Answer:
        until = settings.get("until") or []
        limit = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_gen_toks)
        sampled = settings.get("do_sample", float(settings.get("temperature") or 0) > 0)
        options = {
            "max_new_tokens": min(limit, self.max_length - 1),
            "temperature": float(settings.get("temperature", 1.0)) if sampled else 0.0,
            "top_p": float(settings.get("top_p") or 1.0),
            "top_k": int(settings.get("top_k") or 0),
            "seed": int(settings.get("seed") or 0),
        }
        prompt = self.tok_encode(context)[-(self.max_length - options["max_new_tokens"]) :]
        stop = [until] if isinstance(until, str) else until
        return queue.submit(prompt, stop=[text for text in stop if text], **options)
