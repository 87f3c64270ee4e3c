"""Options of `python -m failfast_jax.serve`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from failfast_jax.drafters import DIFFUSION_METHOD
from failfast_jax.errors import OptionError
from failfast_jax.options import CommandOptions, option
from failfast_jax.util import values
from failfast_jax.util.files import user_path

BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEY_VARIABLE = "FAILFAST_API_KEY"
"""Environment variable with the key that requests must bring."""
NEUTRAL: dict[str, list[Any]] = values.asset("neutral_arguments.toml")
"""Values with which arguments of requests that are not served change nothing; null is another."""


def refuse_diffusion(method: str | None) -> None:
    """Raises OptionError, before anything is read: a queue does not serve the method."""
    if method == DIFFUSION_METHOD:
        reason = f"a queue serves targets that write token by token; python -m failfast_jax.generate runs {method}"
        raise OptionError(f"--method {method}: {reason}")


@dataclasses.dataclass(frozen=True)
class ServeOptions(CommandOptions):
    """Options of the server."""

    batch: int = option(4, "rows: requests that are decoded at once", least=1, most=4096)
    context: int | None = option(
        None, "maximum tokens of a prompt and its answer together (1024, or the models' limit)", least=2, most=2**24
    )
    rounds: int = option(4, "maximum rounds per device call", least=1, most=4096)
    no_prefix_reuse: bool = option(False, "prefill every prompt whole, even if a row holds its beginning")
    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one, with the address on stdout", least=0, most=65535)
    model_name: str | None = option(None, "name of the model in the API (the target's name)")
    api_key_file: str | None = option(None, f"file with the key that requests must bring (or set {KEY_VARIABLE})")
    cors_origin: str | None = option(
        None, "origin of web pages that may call the server (http://localhost:3000), or several with commas; *: any"
    )
    waiting: int = option(64, "queue length; further requests get HTTP 429", least=1, most=65536)
    max_new_tokens: int = option(512, "tokens of an answer to a request that sets no limit", least=1, most=2**24)
    timeout: float = option(600.0, "seconds from a request to the end of its answer", least=0.01, most=86400)
    max_body: int = option(4_000_000, "maximum bytes of a request's body", least=1, most=2**31)
    max_choices: int = option(64, "maximum answers to one request", least=1, most=65536)
    logprobs: int | None = option(
        None, "keep log-probabilities: of each token, and of up to n most probable ones in its place", least=0, most=20
    )
    grace: int = option(30, "seconds to finish running requests at shutdown", least=0, most=86400)

    def key(self) -> str | None:
        """The key that requests must bring; None: no key is needed.

        Raises:
          OptionError: a file that cannot be read, or a key that is empty or does not fit a header.
        """
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if self.api_key_file is not None:
            source = f"--api-key-file {self.api_key_file}"
            try:
                key = user_path(self.api_key_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(f"{source}: cannot be read ({error})") from None
        if key is None:
            return None
        key = key.strip()
        if not (key and key.isascii() and key.isprintable()):
            raise OptionError(f"{source}: must hold a key, one line of printable ASCII; without one, leave it out")
        return key
