"""`python -m failfast_jax.chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import signal
import sys
from pathlib import Path
from typing import Any

from failfast_jax.answer_trace import to_terminal
from failfast_jax.engine import FailFast
from failfast_jax.errors import PromptTooLong, printable_lines
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, add_flags_of, option
from failfast_jax.request_flags import add_engine_flags, add_flags_named, add_model_flags, config_of, load
from failfast_jax.serving.answer import Answer, Finished
from failfast_jax.serving.queue import Queue
from failfast_jax.serving.serve_options import refuse_diffusion
from failfast_jax.template_rendering import LONGEST_TEXT
from failfast_jax.util import command_line, progress
from failfast_jax.util.files import read_stream

SAMPLING = ("temperature", "top_p", "top_k", "seed")
HELP = """\
/reset  forget the conversation
/trace  the last answer's rounds: accepted (green), rejected (struck out), the target's own (blue)
/quit   leave (or Ctrl-D); Ctrl-C stops an answer"""


@dataclasses.dataclass(frozen=True)
class ChatOptions(CommandOptions):
    """Options of the conversation."""

    system: str | None = option(None, "a system message to begin with")
    context: int | None = option(None, "tokens of the conversation (1024, or the models' limit)", least=2, most=2**24)
    max_new_tokens: int = option(512, "maximum tokens of an answer", least=1, most=2**24)


class Chat:
    """A conversation with an engine, in a queue of one row, whose caches stay: a turn prefills only its new tokens.

    Attributes:
      messages: the turns so far.
      last: the last answer; None before the first.
    """

    def __init__(self, engine: FailFast, config: GenerationConfig, options: ChatOptions):
        self.engine, self.options = engine, options
        self.last: Finished | None = None
        self._answer: Answer | None = None
        self._stopped = False
        progress.note("compiling: minutes at the first time, seconds later")
        self.queue = Queue(engine, config, batch=1, rounds=2, least_reuse=1, capacity=options.context)
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
        """Takes a turn, and prints the answer as it comes. If it is stopped, its text so far stays."""
        messages = [*self.messages, {"role": "user", "content": text}]
        self._stopped = False
        answer = self._answer = self.queue.submit(messages)
        if self._stopped:  # before there was an answer
            answer.cancel()
        for piece in answer:
            print(piece, end="", flush=True)
        self.last = answer.result()
        print(" [stopped]" if self.last.finish_reason == "cancelled" else "", flush=True)
        if self.last.finish_reason == "length":
            full = len(self.last.prompt_ids) + len(self.last.output_ids) >= self.queue.capacity
            limit = "--context; /reset forgets the conversation" if full else "--max-new-tokens"
            print(f"[the answer reached its limit: see {limit}]", file=sys.stderr)
        self.messages = [*messages, {"role": "assistant", "content": self.last.text}]

    def command(self, name: str) -> bool:
        """Runs a line that begins with a slash; returns whether the conversation continues."""
        if name == "/reset":
            self.reset()
            print("forgotten")
        elif name == "/trace" and self.last is None:
            print("nothing was said")
        elif name == "/trace":
            print(to_terminal(self.last.rounds, self.engine.tokenizer, colours=sys.stdout.isatty()))
        elif name != "/quit":
            print(HELP if name == "/help" else f"{name}: there is no such command\n{HELP}")
        return name != "/quit"


def _read_line(usual: Any) -> str | None:
    """The user's next line, of which Ctrl-C (handled as `usual`) makes an empty one; None: there is none.

    Raises:
      ConfigError: a line without end.
    """
    try:
        with command_line.handling(usual, signal.SIGINT):
            if sys.stdin.isatty():
                return input("> ").strip()
            if line := read_stream(sys.stdin, "stdin", LONGEST_TEXT, line=True):
                return line.strip()
    except KeyboardInterrupt:
        print("\n/quit leaves")
        return ""
    except EOFError:
        pass
    print()
    return None


def talk(chat: Chat) -> None:
    """Reads lines until the end. Ctrl-C raises an exception only at the prompt."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` its keys and history; not on every system
    with command_line.handling(chat.stop, signal.SIGINT) as [usual]:
        while (line := _read_line(usual)) is not None:
            try:
                if line.startswith("/"):
                    if not chat.command(line):
                        return
                elif line:
                    chat.say(line)
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
    conversation = parser.add_argument_group("conversation")
    add_flags_of(conversation, ChatOptions)
    add_flags_named(conversation, *SAMPLING)
    add_model_flags(parser)
    add_engine_flags(parser, distributed=False)
    return parser


def _work(args: argparse.Namespace) -> None:
    options = ChatOptions.given(args)
    refuse_diffusion(args.method)
    sampling = {name: getattr(args, name) for name in SAMPLING}
    config = config_of(args, exact=args.exact, max_new_tokens=options.max_new_tokens, **sampling)
    engine = load(args)
    engine.encode([{"role": "user", "content": "?"}])  # a chat template is needed
    chat = Chat(engine, config, options)
    try:
        progress.note(f"{Path(str(engine.target_name)).name}, method {chat.queue.config.method}; /help")
        talk(chat)
    finally:
        chat.queue.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    return command_line.run(lambda: _work(args), verbosity=args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
