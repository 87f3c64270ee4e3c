"""`python -m failfast_jax.bench {run,tune,replay,micro}`: measurements; without a command, `run`."""

from __future__ import annotations

import argparse
import importlib
import sys

from failfast_jax import command

COMMANDS = {
    "run": "compare methods on datasets",
    "tune": "find a pair's fastest options on this machine",
    "replay": "time rounds at real sizes, with the paper's acceptance",
    "micro": "time parts of the engine and its kernels",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit status.

    Each command's module has `add_arguments(parser)` and `work(args)`, which returns a status, None for 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv.pop(0) if argv and argv[0] in COMMANDS else "run"
    module = importlib.import_module(f"failfast_jax.bench.{name}")
    others = "; ".join(f"{other}: {said}" for other, said in COMMANDS.items() if other != name)
    parser = argparse.ArgumentParser(
        prog=f"python -m failfast_jax.bench {name}",
        description=module.__doc__,
        epilog=f"Other commands: {others}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    return command.run(lambda: module.work(args))


if __name__ == "__main__":
    sys.exit(main())
