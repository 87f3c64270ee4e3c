"""`python -m failfast_jax.chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from failfast_jax.answer_trace import to_terminal
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast
from failfast_jax.errors import OptionError, PromptTooLong, printable_lines
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, add_flags_of, option
from failfast_jax.request_flags import add_engine_flags, add_method_flags, add_model_flags, config_of, load
from failfast_jax.results import fate
from failfast_jax.serving.queue import PER_REQUEST, Answer, Finished, Queue
from failfast_jax.serving.serve_options import capacity_for, refuse_diffusion
from failfast_jax.template_rendering import LONGEST_TEXT
from failfast_jax.util import command_line, processes, progress
from failfast_jax.util.files import read_stream

HELP = """\
/reset          forget the conversation
/stats          tokens and seconds of the last answer, and of all
/method [name]  show the method, or continue with another one
/trace          the last answer's rounds: accepted (green), rejected (struck out), the target's own (blue)
/quit           leave (or Ctrl-D); Ctrl-C stops an answer"""


@dataclasses.dataclass(frozen=True)
class ChatOptions(CommandOptions):
    """Options of the conversation."""

    system: str | None = option(None, "a system message to begin with")
    context: int | None = option(
        None, "maximum tokens of the conversation (1024, or the models' limit)", least=2, most=2**24
    )
    max_new_tokens: int = option(512, "maximum tokens of an answer", least=1, most=2**24)
    temperature: float = option(0.0, "0 is greedy", least=0)
    top_p: float = option(1.0, "keep the smallest set of best tokens with this probability", least=0, most=1)
    top_k: int = option(0, "keep the k best tokens; 0: all, 1: greedy", least=0)
    seed: int = option(0, "random seed of the conversation", least=0, most=2**32 - 1)


@contextlib.contextmanager
def on_interrupt(handler: Any) -> Iterator[Any]:
    """Inside, `handler` handles Ctrl-C; yields the handler before it."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


def open_queue(engine: FailFast, config: GenerationConfig, options: ChatOptions) -> Queue:
    """Opens a queue with one row, whose caches stay from turn to turn."""
    capacity = capacity_for(options, engine.max_seq_len)
    progress.note("compiling: minutes at the first time, seconds later")
    return Queue(engine, config, batch=1, rounds=2, least_reuse=1, capacity=capacity)


class Chat:
    """A conversation with an engine. Its caches stay: a turn prefills only its new tokens.

    Attributes:
      messages: the turns so far.
      answers: each answer with its counts.
    """

    def __init__(self, engine: FailFast, config: GenerationConfig, options: ChatOptions):
        self.engine, self.options = engine, options
        self.answers: list[Finished] = []
        self._answer: Answer | None = None
        self._stopped = False
        self.queue = open_queue(engine, config, options)
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def stop(self, *_: object) -> None:
        """Stops the current answer, if any. Handles Ctrl-C, and raises nothing."""
        self._stopped = True
        if self._answer is not None:
            self._answer.cancel()

    def say(self, text: str) -> None:
        """Takes a turn, and prints the answer as it comes. Ctrl-C ends the answer; its text so far stays."""
        messages = [*self.messages, {"role": "user", "content": text}]
        settings = {name: getattr(self.options, name) for name in PER_REQUEST if name != "ignore_eos"}
        self._stopped = False
        with on_interrupt(self.stop):
            answer = self._answer = self.queue.submit(messages, **settings)
            if self._stopped:
                answer.cancel()
            for piece in answer:
                print(piece, end="", flush=True)
            finished = answer.result()
            print(" [stopped]" if finished.finish_reason == "cancelled" else "", flush=True)
            if finished.finish_reason == "length":
                full = len(finished.prompt_ids) + len(finished.output_ids) >= self.queue.capacity
                limit = "--context; /reset forgets the conversation" if full else "--max-new-tokens"
                print(f"[the answer reached its limit: see {limit}]", file=sys.stderr)
            self.messages = [*messages, {"role": "assistant", "content": finished.text}]
            self.answers.append(finished)

    def command(self, line: str) -> bool:
        """Runs a line that begins with a slash; returns whether the conversation continues."""
        name, _, argument = line[1:].partition(" ")
        if name == "quit":
            return False
        if name == "reset":
            self.reset()
            print("forgotten")
        elif name in ("stats", "trace"):
            show = self.stats if name == "stats" else self.trace
            print(show() if self.answers else "nothing was said")
        elif name == "method":
            self.change_method(argument.strip())
        else:
            print(HELP if name == "help" else f"/{name}: there is no such command\n{HELP}")
        return True

    def change_method(self, method: str) -> None:
        """Continues with another method and its own defaults, and prints the present one. Ctrl-C returns to the one
        before.

        Raises:
          OptionError: a method that a conversation cannot have, or several processes, which keep theirs.
        """
        if method:
            before = self.queue.config
            refuse_diffusion(method, "/method")
            if method not in METHODS or not processes.is_single_process():
                rule = "needs a single process" if method in METHODS else f"must be one of {', '.join(METHODS)}"
                raise OptionError(f"/method {method}: {rule}")
            config = self.engine.resolve(GenerationConfig(method, exact=before.exact))
            self.engine.build_drafter(config)  # its errors come before the old queue is closed
            self.queue.close()
            try:
                with on_interrupt(signal.default_int_handler):
                    self.queue = open_queue(self.engine, config, self.options)
            except KeyboardInterrupt:
                print("interrupted; going back", file=sys.stderr)
                self.queue = open_queue(self.engine, before, self.options)
        print(f"method: {self.queue.config.method}")

    def trace(self) -> str:
        """Returns the rounds of the last answer."""
        return to_terminal(self.answers[-1].rounds, self.engine.tokenizer, colours=sys.stdout.isatty())

    def stats(self) -> str:
        """Returns counts and times of the last answer, and of all."""
        return f"last: {_summary(self.answers[-1:])}\nall {len(self.answers)}: {_summary(self.answers)}"


def _summary(answers: list[Finished]) -> str:
    def total(count: Callable[[Finished], float]) -> float:
        return sum(map(count, answers))

    tokens, seconds = total(lambda answer: len(answer.output_ids)), total(lambda answer: answer.total_s)
    rounds = total(lambda answer: len(answer.rounds))
    drafted, accepted = total(lambda answer: answer.drafted), total(lambda answer: answer.accepted)
    prompt, reused = total(lambda answer: len(answer.prompt_ids)), total(lambda answer: answer.reused)
    return (
        f"{tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} a second, prefill included), "
        f"{fate(rounds, drafted, accepted)}, prompts of {prompt} tokens, {reused} of them from the caches"
    )


def _read_line() -> str:
    """The user's next line.

    Raises:
      EOFError: there is none.
      ConfigError: a line without end.
    """
    if sys.stdin.isatty():
        return input("> ")
    if not (line := read_stream(sys.stdin, "stdin", LONGEST_TEXT, line=True)):
        raise EOFError
    return line


def talk(chat: Chat) -> None:
    """Reads lines until the end. Ctrl-C raises an exception only at the prompt."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` its keys and history; not on every system
    with on_interrupt(chat.stop) as usual:
        while True:
            try:
                with on_interrupt(usual):
                    line = _read_line().strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n/quit leaves")
                continue
            try:
                if not line.startswith("/"):
                    if line:
                        chat.say(line)
                elif not chat.command(line):
                    return
            except ValueError as error:  # the conversation is unchanged
                full = isinstance(error, PromptTooLong) and any(turn["role"] == "user" for turn in chat.messages)
                remedy = "; /reset forgets the conversation" if full else ""
                print(f"error: {printable_lines(error)}{remedy}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command_line.Parser(
        prog="python -m failfast_jax.chat",
        description="Talk with a model in the terminal. Without --target, SmolLM2-135M-Instruct answers.",
        epilog=HELP,
        formatter_class=command_line.FORMATTER,
    )
    add_flags_of(parser.add_argument_group("conversation"), ChatOptions)
    add_model_flags(parser)
    add_method_flags(parser)
    add_engine_flags(parser)
    return parser


def _work(args: argparse.Namespace) -> None:
    options = ChatOptions.given(args)
    refuse_diffusion(args.method)
    config = config_of(args, exact=args.exact)
    engine = load(args)
    engine.encode([{"role": "user", "content": "?"}])  # a chat template is needed
    if not processes.is_primary():
        with on_interrupt(signal.SIG_IGN), open_queue(engine, config, options) as queue:  # Ctrl-C is for the first
            queue.follow()
        return
    chat = Chat(engine, config, options)
    try:
        progress.note(f"{Path(str(engine.target_name)).name}, method {chat.queue.config.method}; /help")
        talk(chat)
    finally:
        chat.queue.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    return command_line.run(lambda: _work(args), where=args.distributed, verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
