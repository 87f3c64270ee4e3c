"""Answers in Python: whole, as a stream, and what drafting saved.

python examples/generate_and_stream.py                       # the default pair
python examples/generate_and_stream.py TARGET DRAFTER        # folders or Hub ids
"""

from __future__ import annotations

import argparse

from failfast_jax import FailFast, GenerationConfig, enable_compile_cache
from failfast_jax.results import acceptance_summary

PROMPTS = ["Name three rivers.", "Write a Python function that adds two numbers."]


def main(target: str | None = None, drafter: str | None = None, prompts: list = PROMPTS) -> None:
    """Prints answers, the first one also as it comes.

    Where nothing is drafted, drafts cost more here than they save: `method="failfast"` drafts anyway.

    Args:
      prompts: texts, or lists of token ids.
    """
    enable_compile_cache()  # the next run starts in seconds
    engine = FailFast.load(target, drafter)
    config = GenerationConfig(max_new_tokens=48)
    # One row at a time: of a batch, whose rows share every pass, drafts may not pay on a CPU, and none are made.
    for prompt in prompts:
        (result,) = engine.generate(prompt, config)
        stats = result.stats
        print(result.text or result.output_ids)
        print(f"-- {len(result.output_ids)} tokens: {acceptance_summary(stats.rounds, stats.drafted, stats.accepted)}")
    # A seed gives one text, whatever drafts: so does plain decoding.
    sampled = GenerationConfig(max_new_tokens=48, temperature=0.7, seed=1)
    ids = []
    for event in engine.stream(prompts[0], sampled):
        print(event.text or event.ids, end="", flush=True)
        ids += event.ids
    print()
    plain = engine.generate(prompts[0], sampled, method="vanilla")[0]
    print("plain decoding says the same:", plain.output_ids == ids)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter"):
        parser.add_argument(name, nargs="?", help="a folder or a Hub id")
    main(**vars(parser.parse_args()))
