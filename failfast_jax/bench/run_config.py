"""Options of `bench run`: each is declared once, for the command line, the YAML file of `--config` and its checks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from failfast_jax.bench import rows as bench_rows
from failfast_jax.bench.rows import ALL, Row, option_names
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.drafters import METHODS
from failfast_jax.errors import OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.kernels.kernel_table import KERNELS
from failfast_jax.options import CommandOptions, add_flag, option, type_of
from failfast_jax.public_data import question_sets
from failfast_jax.public_data.question_sets import CHOICES, SOURCES, Dataset, load_dataset
from failfast_jax.util import processes
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import user_path

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""Files of `--config` that come with the package, by name."""
ALIASES = {"methods": "rows", "dataset": "datasets", "set": "options"}
"""Keys of the file whose flags hold text: `--methods`, `--dataset`, `--set`."""
GROUPS = {"dataset": "questions and methods", "target": "models", "out": "result"}
"""Headings of the help page, by their first flag."""
METAVARS = {"dataset": "D", "data": "[D=]FILE", "methods": "a,b", "sweep": "NAME:key=VALUES", "set": "key=value"}
METAVARS |= {"target": "P", "drafter": "P", "ar_drafter": "P", "out": "DIR"}
Entry = TypeVar("Entry", bound=CommandOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(CommandOptions):
    """Options of a run, which a file and flags give; flags win. A field without a help text has no flag.

    Raises:
      OptionError: a value of another type or out of its range.
    """

    dataset: tuple = option((), f"{', '.join(SOURCES)}, or a file of prompts")
    datasets: tuple = option((), "")
    """Of the file: names, or mappings."""
    data: tuple = option((), "JSONL, JSON or Parquet with the rows of dataset D, instead of its package or the Hub")
    choices: str | None = option(None, "order of GPQA's answers: shuffled per question, or A correct", choices=CHOICES)
    limit: int | None = option(None, "first n rows of each dataset", least=1)
    methods: str | None = option(
        None,
        f"rows: a method or a row of the file, with options: NAME:key=value,..., and values to compare: "
        f"NAME:key=v1|v2 or NAME:key=FIRST:LAST; methods: {', '.join(METHODS)}, or {ALL}",
    )
    rows: tuple = option((), "")
    """`methods` of the file: text, or mappings."""
    sweep: tuple = option((), "one more row, with values to compare: NAME:key=v1|v2 (best point per dataset)")
    max_new_tokens: int = option(256, "maximum length of an answer in tokens", least=1)
    set: tuple = option((), f"for all methods, or with ROW:key=value for a row: {', '.join(option_names())}")
    options: Mapping | None = option(None, "")
    """Of the file: options for all methods."""
    repeats: int = option(1, "runs per question and row", least=1)

    target: str | None = option(None, "none: the default pair's, whatever the file says")
    drafter: str | None = option(None, "block-diffusion drafter, or one that reads the target's features")
    ar_drafter: str | None = option(None, "autoregressive drafter")
    dtype: str | None = option(None, "weight dtype", choices=tuple(DTYPES))
    tensor_parallel: int = option(1, "devices that share each layer", least=1)
    attention: str | None = option(None, "kernel of cached attention", choices=KERNELS)
    weights: Mapping | None = option(None, "")
    """Of the file: where models come from, by name."""

    out: str = option("failfast-bench", "an interrupted run continues there")
    near_tie: float = option(1e-3, "treat a differing token as equal if the top-2 logit gap is below x")
    exact: bool = option(False, "bit-identical outputs: nothing is excused")
    scores: bool = option(True, "is each answer right?")
    figures: bool = option(True, "PNG and SVG")

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> RunConfig:
        """Returns the flags over the file of `--config` or `--preset` over the defaults.

        Raises:
          ValueError: a file that cannot be read, or a value that is refused.
        """
        path = PRESETS.get(args.preset, args.config)
        names = [field.name for field in dataclasses.fields(cls)]
        flags = {name: value for name in names if (value := getattr(args, name, None)) is not None}
        flags |= {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
        flags |= {name: None for name in ("target", "drafter", "ar_drafter") if flags.get(name) == "none"}
        return cls(**{**(read_config(path) if path is not None else {}), **flags})

    def common(self) -> GenerationConfig:
        """Returns the options of every row that has none of its own, checked."""
        options = {"max_new_tokens": self.max_new_tokens, **(self.options or {})}
        options |= bench_rows.parse_options("--set", [text for text in self.set if not _names_row(text)])
        options |= {"exact": True} if self.exact else {}
        config = GenerationConfig(**options)
        config.validate()
        return config

    def chosen_rows(self) -> list[Row]:
        """Returns the rows that are compared; see `select_rows`.

        Raises:
          ValueError: an unknown method or option; the message names the flag or the file's entry.
        """
        file_rows = [
            bench_rows.parse_row(entry, bench_rows.PLAIN_ROWS, f"methods: {entry}")
            if isinstance(entry, str)
            else read_entry(bench_rows.RowEntry, entry, "methods").row()
            for entry in self.rows
            if entry != ALL
        ]
        if self.methods is not None:
            methods = bench_rows.split_entries(self.methods) or [""]
        else:
            methods = [row.label for row in file_rows] + [ALL] * (ALL in self.rows or not file_rows)
        common = self.common()
        rows = bench_rows.select_rows(methods, self.sweep, file_rows, list(filter(_names_row, self.set)), self.target)
        bench_rows.check_common(common, rows)
        for row in rows:
            row.config(common)
        return rows

    def read_datasets(self) -> list[Dataset]:
        """Returns the questions of `--dataset`, or of the file.

        Raises:
          ValueError, OSError: an unknown or repeated dataset, or rows that cannot be had; the message names them, all
            that cannot be fetched at once.
        """
        entries = [
            DatasetEntry(name=e) if isinstance(e, str) else read_entry(DatasetEntry, e, "datasets")
            for e in self.datasets
        ]
        by_name = {entry.name: entry for entry in entries}
        if self.dataset:
            names = [name for text in self.dataset for name in question_sets.names_of(text)]
            entries = [by_name.get(name, DatasetEntry(name=name)) for name in names]
        if not entries:
            raise ValueError(f"--dataset: name one of {', '.join(SOURCES)}, or a file of prompts")
        files = question_sets.files_of(self.data, [entry.name for entry in entries])
        if self.choices and not any(entry.name == "gpqa" for entry in entries):
            raise ValueError(f"--choices {self.choices}: --dataset does not name gpqa")
        datasets: dict[str, Dataset] = {}
        unreachable: list[question_sets.UnreachableError] = []
        for entry in entries:
            try:
                dataset = entry.load(files.get(entry.name), self.limit, self.choices)
            except question_sets.UnreachableError as error:
                unreachable.append(error)
                continue
            except ValueError as error:
                flag = "" if entry.name in by_name else "--dataset "
                flag = "--data " if entry.name in files and entry.data is None else flag
                raise ValueError(f"{flag}{error}") from None
            if dataset.name in datasets:
                raise ValueError(f"--dataset {entry.name}: named twice")
            datasets[dataset.name] = dataset
        if unreachable:
            raise ValueError("\n".join(map(str, unreachable))) from unreachable[0]
        return list(datasets.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetEntry(CommandOptions):
    """A mapping in a file's `datasets`."""

    name: str = option("", "dataset, or file of prompts")
    data: str | None = option(None, "file with its rows")
    limit: int | None = option(None, "first n rows", least=1)
    template: str | None = option(None, "prompt in place of the standard one")
    choices: str | None = option(None, "order of GPQA's answers", choices=CHOICES)

    def load(self, file: Path | None, limit: int | None, choices: str | None) -> Dataset:
        """Returns the questions; `--data`, `--limit` and `--choices` say what the mapping leaves open."""
        return load_dataset(
            self.name,
            data=user_path(self.data) if self.data is not None else file,
            limit=self.limit if self.limit is not None else limit,
            template=self.template,
            choices=choices if self.name == "gpqa" and choices else self.choices,
        )


def _names_row(text: str) -> bool:
    return ":" in text.partition("=")[0]


def read_entry(kind: type[Entry], entry: Any, where: str) -> Entry:
    """Returns a mapping of a file as the dataclass that declares its keys.

    Raises:
      ValueError: no mapping, an unknown key, or a value that is refused; the message begins with `where`.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(entry, Mapping) or entry.keys() - set(fields):
        raise ValueError(f"{where}: {entry!r} must be text, or have the keys {', '.join(fields)}")
    for key, value in entry.items():
        if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where}: {key} {value!r}: its keys must be text")
    try:
        return kind(**entry)
    except OptionError as error:
        raise ValueError(f"{where}: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Returns the values of a YAML file by the name of their field.

    Raises:
      ValueError: it cannot be read, is no mapping, or has an unknown key or a value of another type; the message
        names file and key.
    """
    yaml = import_optional("yaml", "--config")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping")
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in fields:
            keys = [other for other in fields if other not in ALIASES.values()]
            raise ValueError(f"{path}: unknown key {key!r} (keys: {', '.join(keys)}, datasets, options)")
        if type_of(fields[name]) == "tuple":
            value = tuple(value) if isinstance(value, list) else (value,)
        if name in ("data", "sweep") and not all(isinstance(text, str) for text in value):
            raise ValueError(f"{path}: {key}: {value!r} must be text")
        values[name] = value
    read_entry(RunConfig, values, str(path))
    for name in values.get("options") or ():
        bench_rows.check_option(f"{path}: options", name)
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; an absent flag is None."""
    whole = parser.add_mutually_exclusive_group()
    whole.add_argument("--config", metavar="FILE", type=user_path, help="YAML with the long names below as keys")
    whole.add_argument("--preset", choices=PRESETS, help="a built-in --config file")
    group = parser
    for field in dataclasses.fields(RunConfig):
        if field.name in GROUPS:
            note = "without any of them, the default pair" if field.name == "target" else None
            group = parser.add_argument_group(GROUPS[field.name], note)
            if field.name == "target":
                processes.add_flag(group)
        more: dict[str, Any] = {"metavar": METAVARS[field.name]} if field.name in METAVARS else {}
        if type_of(field) == "tuple":
            more |= {"action": "extend", "nargs": "+"}
        elif field.default is True:
            more["action"] = argparse.BooleanOptionalAction
        if help_text := field.metadata["option"].help:
            add_flag(group, field, help_text if type_of(field) == "tuple" else None, **more)
    group.add_argument("--redraw", action="store_true", help="only draw the figures of --out again")
