"""Many requests at once, from any thread: a scheduler in a thread of its own, with text around it.

with Queue(engine, batch=4, capacity=1024) as queue:
    answers = [queue.submit(prompt, temperature=0.7, seed=1, stop=["\\n\\n"]) for prompt in prompts]
    for piece in answers[0]:
        print(piece, end="")
    print(answers[1].result().text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError, PromptTooLong
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.prompts import answer_text, characters
from failfast_jax.serving.answer import Answer, Piece
from failfast_jax.serving.scheduler import RowSettings, Scheduler
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.util import processes
from failfast_jax.util.compilation import count_compiles

logger = logging.getLogger("failfast_jax")

PER_REQUEST = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields of `GenerationConfig` that each request sets for itself; the others are the queue's."""
IDLE_S = 1.0
"""Longest silence of the first process: the others might take a longer one for a fault."""


class QueueFull(Exception):
    """The maximum number of requests waits already; try again in `seconds`."""

    def __init__(self, limit: int, seconds: float):
        super().__init__(f"the queue is full: waiting requests: {limit}")
        self.seconds = seconds


class QueueClosed(Exception):
    """The queue takes no more requests: it is closed, or its thread has failed."""


class Queue:
    """An engine's rows, shared by requests from any thread, in order of arrival.

    The constructor compiles everything and measures the costs of rounds if needed; after it nothing is compiled. Of
    several processes each opens the same queue; the first takes requests, the others `follow`.

    Args:
      engine: models and tokenizer. It must not be used otherwise while the queue is open.
      config: method, its options, `acceptance` and `exact` of all requests, and defaults of each request's fields.
      capacity: maximum number of tokens in a prompt and its answer together; None: 1024, or the engine's `max_seq_len`.
      waiting: maximum number of requests without a row.
      rows: other fields of `RowSettings`; `logprobs` is the maximum of other tokens' log-probabilities that a request
        may ask for (None: not even its own).

    Attributes:
      error: the error that ended the queue's thread, if any.
      compilations: compile counts of this process while the queue is open.

    Raises:
      OptionError: options that cannot be served.
    """

    def __init__(
        self,
        engine: FailFast,
        config: GenerationConfig | None = None,
        *,
        capacity: int | None = None,
        waiting: int = 64,
        **rows: Any,
    ):
        self.engine, self.config = engine, engine.resolve(config)
        settings = RowSettings(exact=self.config.exact, capacity=capacity or min(1024, engine.max_seq_len), **rows)
        if not 1 <= settings.batch <= 4096:
            raise OptionError(f"--batch {settings.batch}: must be at least 1, at most 4096")
        if not 2 <= settings.capacity <= engine.max_seq_len:
            raise OptionError(f"--context {settings.capacity}: must be at least 2, at most {engine.max_seq_len}")
        refuse_diffusion(self.config.method)
        if engine.target.config.is_diffusion:
            raise OptionError(f"{engine.target_name}: a queue serves targets that write token by token")
        self.batch, self.capacity, self.logprobs = settings.batch, settings.capacity, settings.logprobs
        self._counting = contextlib.ExitStack()
        self.compilations = self._counting.enter_context(count_compiles())
        self.scheduler = Scheduler(engine.runtime, engine.build_drafter(self.config), settings)
        self.error: BaseException | None = None
        self._max_waiting, self._submitted = waiting, 0
        # No token is longer than the longest. Megabytes are refused before they are tokenized, which would delay all
        # other requests.
        names = () if engine.tokenizer is None else engine.tokenizer.get_vocab()
        self._max_characters = self.capacity * max(map(len, names), default=0)
        self._lock, self._encoding, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="failfast-queue", daemon=True)
        if processes.is_primary():
            self._thread.start()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def unfinished(self) -> int:
        """Number of requests that wait, or have a row."""
        return self._submitted - self.scheduler.counts.ended

    @property
    def healthy(self) -> bool:
        """True while requests are served."""
        return self._open and self.error is None and self._thread.is_alive()

    def encode(self, prompt: Any, *, template: bool = True) -> list[int]:
        """Token ids of a prompt; `template` as in `FailFast.encode`.

        Raises:
          PromptError: see there; `PromptTooLong`: it leaves no room for an answer.
        """
        if (length := characters(prompt)) > self._max_characters > 0:
            limit = f"{self.capacity} tokens, those of its answer among them, spell at most {self._max_characters}"
            raise PromptTooLong(f"the prompt has {length} characters; {limit}")
        with self._encoding:
            ids = self.engine.encode(prompt, template=template)
        if len(ids) >= self.capacity:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens; with its answer it may have {self.capacity}")
        return ids

    def submit(
        self,
        prompt: Any,
        *,
        sequence: int = 0,
        stop: Sequence[str] = (),
        on_piece: Callable[[Piece], None] | None = None,
        logprobs: int | None = None,
        own_turn: bool = False,
        **options: Any,
    ) -> Answer:
        """Puts a request in line. Its text depends on itself alone: seed, sequence and position key the randomness.

        Args:
          prompt: text, messages or ids.
          sequence: number of the sample, among samples of one prompt and seed.
          stop: strings before the first of which the answer ends, or names of special tokens; they need a tokenizer.
          on_piece: called with each `Piece`, in the queue's thread; see `Answer`.
          logprobs: most probable tokens to report beside each picked one; None: none, see `Answer`.
          own_turn: whether ids come from a chat template, so that the answer is a text of its own; otherwise its text
            continues that of the ids.
          options: fields named in `PER_REQUEST`. `max_new_tokens` is cut to the room that is left.

        Raises:
          OptionError, PromptError: a request that cannot be served.
          QueueFull: too many wait already.
          QueueClosed: no more requests are taken.
        """
        if unknown := options.keys() - set(PER_REQUEST):
            raise OptionError(f"{', '.join(sorted(unknown))}: a request may set {', '.join(PER_REQUEST)}")
        if stop and self.engine.tokenizer is None:
            raise OptionError("stop strings: the model has no tokenizer")
        if logprobs is not None and not 0 <= logprobs <= (-1 if self.logprobs is None else self.logprobs):
            limit = "none" if self.logprobs is None else f"at most {self.logprobs}"
            raise OptionError(f"logprobs {logprobs}: this server keeps {limit}; start it with --logprobs n")
        ids = self.encode(prompt)
        config = dataclasses.replace(self.config, **options)
        config.validate()
        config = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, self.capacity - len(ids)))
        text = answer_text(self.engine.tokenizer, prompt, () if own_turn else ids, stop)
        answer = Answer(self.engine.request(ids, config, sequence), text, on_piece, logprobs)
        with self._lock:
            if not self.healthy:
                raise self._closed()
            # Free rows will take some of the waiting requests.
            if self.unfinished >= self.batch + self._max_waiting:
                counts = self.scheduler.counts
                raise QueueFull(self._max_waiting, min(max(counts.decode_seconds / max(counts.ended, 1), 1.0), 60.0))
            self._submitted += 1
            self.scheduler.submit(answer)
        self._wake.set()
        return answer

    def close(self) -> None:
        """Takes no more requests, ends the present ones with `QueueClosed`, and ends the thread."""
        with self._lock:
            self._open = False
        self._wake.set()
        if processes.is_primary():
            self._thread.join()
        self._counting.close()

    def follow(self) -> None:
        """In processes other than the first: computes what its queue computes, until that is closed."""
        self.scheduler.follow()

    # The thread.

    def _work(self) -> None:
        try:
            while self._open:
                if not self.unfinished:
                    self._wake.wait(None if processes.is_single_process() else IDLE_S)
                    self._wake.clear()
                self.scheduler.step()
            self.scheduler.close()
        except BaseException as error:  # every waiting caller receives it
            logger.exception("the queue's thread failed")
            self.error = error
        with self._lock:
            self._open = False
        self.scheduler.abandon(self._closed())

    def _closed(self) -> QueueClosed:
        return QueueClosed(f"the queue is closed{'' if self.error is None else f': {self.error}'}")
