"""Options of `python -m failfast_jax.serve`."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from failfast_jax.drafters import DIFFUSION_METHOD
from failfast_jax.errors import OptionError
from failfast_jax.files import user_path
from failfast_jax.options import CommandOptions, option

BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEY_VARIABLE = "FAILFAST_API_KEY"
"""Environment variable: the key that requests must bring."""


def check_limit(options: Any, capacity: int) -> None:
    """Raises OptionError: `--max-new-tokens` was given, and no prompt leaves room for so many in `capacity` tokens."""
    limit = options.max_new_tokens
    if limit != type(options).max_new_tokens and limit >= capacity:
        raise OptionError(
            f"--max-new-tokens {limit}: prompt and answer have room for {capacity} tokens together; ask for fewer, or "
            "raise --context"
        )


def refuse_diffusion(method: str | None, given: str = "--method") -> None:
    """Raises OptionError, before anything is read: the method is none that a queue serves.

    Args:
      given: how the method was named.
    """
    if method == DIFFUSION_METHOD:
        said = f"a queue serves targets that write token by token; python -m failfast_jax.generate runs {method}"
        raise OptionError(f"{given} {method}: {said}")


@dataclasses.dataclass(frozen=True)
class RowOptions(CommandOptions):
    """How requests share an engine."""

    batch: int = option(4, "rows: requests that are decoded at once", least=1, most=4096)
    context: int | None = option(
        None, "most tokens of a prompt and its answer together (1024, or what the model has)", least=2, most=2**24
    )
    rounds: int = option(4, "most rounds between two looks at what came out", least=1, most=4096)
    no_prefix_reuse: bool = option(False, "prefill every prompt whole, whatever the rows hold of it already")

    def for_queue(self, max_seq_len: int) -> dict[str, Any]:
        """Arguments of `Queue` for an engine with room for so many tokens.

        Raises:
          OptionError: there is less room than was asked for.
        """
        if self.context is not None and self.context > max_seq_len:
            raise OptionError(f"--context {self.context}: the models have room for {max_seq_len} tokens")
        capacity = self.context or min(1024, max_seq_len)
        return {
            "batch": self.batch,
            "capacity": capacity,
            "rounds": self.rounds,
            "reuse": not self.no_prefix_reuse,
        }


@dataclasses.dataclass(frozen=True)
class ServeOptions(RowOptions):
    """Options of the server."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one, with the address on stdout", least=0, most=65535)
    model_name: str | None = option(None, "what the model is called in the API (the target's name)")
    api_key_file: str | None = option(None, f"file with the key that requests must bring (or set {KEY_VARIABLE})")
    cors_origin: str | None = option(
        None, "origin of web pages that may call the server (http://localhost:3000), or several with commas; *: any"
    )
    waiting: int = option(64, "most requests that wait for a row; more are told to come again", least=1, most=65536)
    max_new_tokens: int = option(512, "tokens of an answer to a request that names no limit", least=1, most=2**24)
    timeout: float = option(600.0, "seconds from a request to the end of its answer", least=0.01, most=86400)
    max_body: int = option(4_000_000, "most bytes of a request's body", least=1, most=2**31)
    max_choices: int = option(64, "most answers to one request", least=1, most=65536)
    logprobs: int | None = option(
        None,
        "keep log-probabilities: of each token that is said, and of up to n most probable ones at its place",
        least=0,
        most=20,
    )
    grace: int = option(30, "seconds that answers are given to end when the server is told to", least=0, most=86400)

    def origins(self) -> list[str]:
        """Origins of pages that browsers let call the server.

        Raises:
          OptionError: no origin.
        """
        origins = [] if self.cors_origin is None else [origin.strip() for origin in self.cors_origin.split(",")]
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise OptionError(f"--cors-origin {origin}: must be * or like http://localhost:3000, without a path")
        return origins

    def key(self) -> str | None:
        """The key that requests must bring; None: they need not.

        Raises:
          OptionError: a file that cannot be read, or a key that is empty or that no header can hold.
        """
        if self.api_key_file is None:
            key, where, cure = os.environ.get(KEY_VARIABLE), KEY_VARIABLE, "; unset it to serve without a key"
            if key is None:
                return None
        else:
            where, cure = f"--api-key-file {self.api_key_file}", ""
            try:
                key = user_path(self.api_key_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(f"{where}: cannot be read ({error})") from None
        key = key.strip()
        if not key:
            raise OptionError(f"{where}: is empty{cure}")
        if not (key.isascii() and key.isprintable()):
            raise OptionError(f"{where}: a key must be one line of printable ASCII, as it stands in a header")
        return key
