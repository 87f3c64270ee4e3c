"""`python -m failfast_jax.chat`: a conversation in the terminal."""

from __future__ import annotations

from failfast_jax import starting

starting.begin(__name__)  # before the imports that take seconds

import argparse
import contextlib
import dataclasses
import importlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failfast_jax import command, distributed, progress, streams
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS
from failfast_jax.engine import FailFast
from failfast_jax.engine_flags import add_engine_flags, add_method_flags, add_model_flags, config_of, load_engine
from failfast_jax.errors import OptionError, PromptTooLong, printable_lines
from failfast_jax.files import read_stream
from failfast_jax.options import CommandOptions, add_flags_of, option
from failfast_jax.results import fate
from failfast_jax.serving.request_queue import PER_REQUEST, Answer, Finished, Queue
from failfast_jax.serving.serve_options import RowOptions, check_limit, refuse_diffusion
from failfast_jax.templates import LONGEST_TEXT
from failfast_jax.trajectory import to_terminal

HELP = """\
/reset          forget the conversation
/stats          what the last answer took, and all of them
/method [name]  say the method, or go on with another one
/trace          the last answer's rounds: accepted (green), rejected (struck out), the target's own (blue)
/quit           leave (or Ctrl-D); Ctrl-C stops an answer"""


@dataclasses.dataclass(frozen=True)
class ChatOptions(CommandOptions):
    """Options of the conversation."""

    system: str | None = option(None, "a system message to begin with")
    context: int | None = option(
        None, "most tokens of the conversation (1024, or what the model has)", least=2, most=2**24
    )
    max_new_tokens: int = option(512, "most tokens of an answer", least=1, most=2**24)
    temperature: float = option(0.0, "0 is greedy", least=0)
    top_p: float = option(1.0, "keep the smallest set of best tokens with this probability", least=0, most=1)
    top_k: int = option(0, "keep the k best tokens; 0: all, 1: greedy", least=0)
    seed: int = option(0, "one seed, one conversation", least=0, most=2**32 - 1)


@contextlib.contextmanager
def handling(handler: Any) -> Iterator[Any]:
    """Inside, this handles Ctrl-C; gives what did before."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)


def open_queue(engine: FailFast, config: GenerationConfig, options: ChatOptions) -> Queue:
    """One row, whose caches stay from turn to turn."""
    rows = RowOptions(batch=1, context=options.context, rounds=2).for_queue(engine.max_seq_len)
    check_limit(options, rows["capacity"])
    progress.note("compiling: minutes at the first time, seconds later")
    return Queue(engine, config, least_reuse=1, **rows)


def other_method(engine: FailFast, config: GenerationConfig, method: str) -> GenerationConfig:
    """Another method, with its own defaults.

    Raises:
      OptionError: none of those that a conversation can have.
    """
    refuse_diffusion(method, "/method")
    if method not in METHODS:
        raise OptionError(f"/method {method}: must be one of {', '.join(METHODS)}")
    return engine.resolve(GenerationConfig(method, exact=config.exact))


def follow(engine: FailFast, config: GenerationConfig, options: ChatOptions) -> None:
    """What other processes than the first do: they compute its answers, with whatever method, until it leaves. Ctrl-C
    is for the first, also where it comes to all of them."""
    with handling(signal.SIG_IGN):
        method: str | None = config.method
        while method is not None:
            with open_queue(engine, config, options) as queue:
                queue.follow()
            if (method := distributed.agreed(None)) is not None:
                config = other_method(engine, config, method)


class Chat:
    """A conversation with an engine. Its caches stay: a turn prefills what is new.

    Attributes:
      messages: what was said.
      answers: what each answer took.
    """

    def __init__(self, engine: FailFast, config: GenerationConfig, options: ChatOptions):
        self.engine, self.options = engine, options
        self.answers: list[Finished] = []
        self._answer: Answer | None = None
        self._stopped = False
        self.queue = open_queue(engine, config, options)
        self.reset()

    def close(self) -> None:
        """Ends the queue, and the processes that follow."""
        self._leave_queue(None)

    def _leave_queue(self, method: str | None) -> None:
        self.queue.close()
        distributed.agreed(method)

    def reset(self) -> None:
        """Forgets the conversation."""
        system = self.options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def stop(self, *_: object) -> None:
        """Stops the answer that is being given, if there is one: a handler of Ctrl-C, which raises nothing."""
        self._stopped = True
        if self._answer is not None:
            self._answer.cancel()

    def say(self, text: str) -> None:
        """Takes a turn, and prints the answer as it comes. Any number of Ctrl-C end it; what was said stays."""
        messages = [*self.messages, {"role": "user", "content": text}]
        settings = {name: getattr(self.options, name) for name in PER_REQUEST if name != "ignore_eos"}
        self._stopped = False
        with handling(self.stop):
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
        """A line that begins with a slash; returns whether the conversation goes on."""
        name, _, argument = line[1:].partition(" ")
        if name == "quit":
            return False
        if name == "reset":
            self.reset()
            print("forgotten")
        elif name == "stats":
            print(self.stats())
        elif name == "method":
            self.change_method(argument.strip())
        elif name == "trace":
            print(self.trace())
        else:
            print(HELP if name == "help" else f"/{name}: there is no such command\n{HELP}")
        return True

    def change_method(self, method: str) -> None:
        """Goes on with another method; none: says which. Ctrl-C goes back to the one before, if no process follows."""
        if method:
            before = self.queue.config
            config = other_method(self.engine, before, method)
            self.engine.build_drafter(config)  # what cannot be served is said before the old queue is closed
            self._leave_queue(method)
            try:
                with handling(signal.default_int_handler if distributed.alone() else signal.SIG_IGN):
                    self.queue = open_queue(self.engine, config, self.options)
            except KeyboardInterrupt:
                print("interrupted; going back", file=sys.stderr)
                self.queue = open_queue(self.engine, before, self.options)
        print(f"method: {self.queue.config.method}")

    def trace(self) -> str:
        """How the last answer came about."""
        if not self.answers:
            return "nothing was said"
        return to_terminal(self.answers[-1].rounds, self.engine.tokenizer, colours=sys.stdout.isatty())

    def stats(self) -> str:
        """What answers took."""
        if not self.answers:
            return "nothing was said"
        return f"last: {_sentence(self.answers[-1:])}\nall {len(self.answers)}: {_sentence(self.answers)}"


def _sentence(answers: list[Finished]) -> str:
    tokens, rounds = (sum(len(part) for part in parts) for parts in zip(*((a.output_ids, a.rounds) for a in answers)))
    seconds = sum(answer.total_s for answer in answers)
    prompt, reused = sum(len(a.prompt_ids) for a in answers), sum(a.reused for a in answers)
    drafted, accepted = sum(a.drafted for a in answers), sum(a.accepted for a in answers)
    return (
        f"{tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} a second, prefill included), "
        f"{fate(rounds, drafted, accepted)}, prompts of {prompt} tokens, {reused} of them from the caches"
    )


def _line() -> str:
    """What the user says next.

    Raises:
      EOFError: nothing more.
      ConfigError: a line without end.
    """
    if sys.stdin.isatty():
        return input("> ")
    if not (line := read_stream(sys.stdin, "stdin", LONGEST_TEXT, line=True)):
        raise EOFError
    return line


def talk(chat: Chat) -> None:
    """Reads lines until the end. Ctrl-C raises an exception at the prompt only."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # which gives `input` its keys and its history; not on every system
    with handling(chat.stop) as usual:
        while True:
            try:
                with handling(usual):
                    line = _line().strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n/quit leaves")
                continue
            try:
                if line.startswith("/"):
                    if not chat.command(line):
                        return
                elif line:
                    chat.say(line)
            except ValueError as error:  # the conversation is as it was before
                full = isinstance(error, PromptTooLong) and any(turn["role"] == "user" for turn in chat.messages)
                print(
                    f"error: {printable_lines(error)}{'; /reset forgets the conversation' if full else ''}",
                    file=sys.stderr,
                )


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command.Parser(
        prog="python -m failfast_jax.chat",
        description="Talk with a model in the terminal. Without --target, SmolLM2-135M-Instruct answers.",
        epilog=HELP,
        formatter_class=command.FORMATTER,
    )
    add_flags_of(parser.add_argument_group("conversation"), ChatOptions)
    add_model_flags(parser)
    add_method_flags(parser)
    add_engine_flags(parser, together=True)
    return parser


def _work(args: argparse.Namespace) -> None:
    options = ChatOptions.given(args)
    if distributed.speaks():
        streams.need_stdout()
    refuse_diffusion(args.method)
    config = config_of(args, exact=args.exact)
    engine = load_engine(args, config.method)
    engine.encode([{"role": "user", "content": "?"}])  # a chat template is needed
    if not distributed.speaks():
        follow(engine, config, options)
        return
    chat = Chat(engine, config, options)
    try:
        progress.note(f"{Path(str(engine.target_name)).name}, method {chat.queue.config.method}; /help")
        talk(chat)
    finally:
        chat.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    return command.run(lambda: _work(args), where=args.distributed, verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
