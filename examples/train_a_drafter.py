"""A drafter for a target of your own, from the target's own answers: write, train, use, compare.

    python examples/train_a_drafter.py TARGET PROMPTS.txt FOLDER      # a prompt a line; options of `train` may follow

Some hundred prompts show that everything works. A drafter that pays wants thousands, and an accelerator:
docs/train-a-drafter.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from failfast_jax import FailFast, enable_compile_cache
from failfast_jax.results import acceptance_summary
from failfast_jax.train.__main__ import main as train
from failfast_jax.train.documents import write_documents


def write_answers(engine: FailFast, prompts: list, file: Path, max_new_tokens: int = 256, batch: int = 8) -> None:
    """Greedy answers to prompts (texts or ids) as documents of `train`."""
    documents = []
    for first in range(0, len(prompts), batch):
        results = engine.generate(prompts[first : first + batch], method="vanilla", max_new_tokens=max_new_tokens)
        documents += [(result.prompt_ids, result.output_ids) for result in results]
    write_documents(file, documents, engine.target.config.vocab_size)


def main(target: str, prompts: list, folder: str | Path, *options: str, max_new_tokens: int = 256) -> Path:
    """Makes the drafter and prints how it does on a prompt; returns its folder.

    Args:
      options: flags of `python -m failfast_jax.train`.
    """
    enable_compile_cache()  # for the answers; commands do so themselves
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "answers.npz"
    if not data.exists():
        write_answers(FailFast.load(target), prompts, data, max_new_tokens)
    # Two layers that read the target's hidden states. The same command goes on where it was stopped.
    arguments = [
        "--target",
        str(target),
        "--data",
        str(data),
        "--out",
        str(folder / "run"),
        "--row-features",
        "--borrow",
    ]
    if status := train([*arguments, *options]):
        raise SystemExit(status)
    drafter = folder / "run" / "drafter"
    engine = FailFast.load(target, drafter)
    drafted, plain = (
        engine.generate(prompts[0], method=method, max_new_tokens=max_new_tokens)[0]
        for method in ("failfast", "vanilla")
    )
    print(acceptance_summary(drafted.stats.rounds, drafted.stats.drafted, drafted.stats.accepted))
    print("plain decoding says the same:", drafted.output_ids == plain.output_ids)
    return drafter


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a folder or a Hub id")
    parser.add_argument("prompts", type=Path, help="a file of text")
    parser.add_argument("folder", help="where documents and drafter are written")
    given, more = parser.parse_known_args()
    try:
        prompts = given.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{given.prompts}: {error}")
    main(given.target, prompts, given.folder, *more)
