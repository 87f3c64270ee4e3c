"""Rows of a comparison: methods with their options, from `method:key=value,...` or YAML, and products of sweeps."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from failfast_jax.drafters import METHODS
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import CommandOptions, check_value, option

BASELINE, ALL = "vanilla", "all"
MOST_POINTS = 1000
"""Maximum number of points of a sweep."""
CORPUS = "corpus"
"""Option of `suffix` here: tokens of a corpus of earlier questions and answers, which the run fills as it goes."""
DRAFTER = "drafter"
"""Option of methods with a model here: the row's own drafter, a path or Hub id."""
THETA = "rope_theta_drafter"
"""Option of methods with a model here: base frequency of the drafter's rotary embedding, in place of the folder's."""
BATCH = "batch"
"""Option of every method here: questions that are answered together, by the row and by its `vanilla`."""
OURS = (CORPUS, DRAFTER, THETA, BATCH)
REQUEST = [f.name for f in dataclasses.fields(GenerationConfig) if f.name not in ("method", "options")]


# -- options of requests and of methods ----------------------------------------------------------------------------


def option_names(method: str | None = None) -> list[str]:
    """Returns the options of every request (`max_new_tokens` has a flag of its own), and of a method or of all."""
    names = [name for name in REQUEST if name != "max_new_tokens"]
    if method is None:
        return list(dict.fromkeys([*names, *(name for kind in METHODS.values() for name in kind.names())]))
    names += [*METHODS[method].names(), BATCH]
    names += [CORPUS] if method == "suffix" else []
    return names + ([DRAFTER, THETA] if METHODS[method].kinds else [])


def check_option(shown: str, name: str, method: str | None = None) -> None:
    """Raises ValueError, with a message that begins with `shown`, if a method (or all of them) has no such option."""
    if name not in option_names(method):
        of_method = f" of {method}" if method else ""
        raise ValueError(f"{shown}: there is no option {name!r}{of_method}; options: {', '.join(option_names(method))}")


def parse_value(text: str) -> Any:
    """Returns the value of `none`, `true`, `false`, a number or text; of `FIRST:LAST` or `v1|v2|...` a tuple."""
    if re.fullmatch(r"\s*\d{1,9}\s*:\s*\d{1,9}\s*", text):
        first, last = map(int, text.split(":"))
        if not 0 <= last - first < MOST_POINTS:
            raise ValueError(f"{text}: a range must be FIRST:LAST, of at most {MOST_POINTS} integers")
        return tuple(range(first, last + 1))
    if "|" in text:
        return tuple(parse_value(part.strip()) for part in text.split("|"))
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def parse_options(shown: str, pairs: Iterable[str], method: str | None = None) -> dict[str, Any]:
    """Returns options from `key=value`, or raises ValueError with a message that begins with `shown`."""
    options = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"{shown}: {text} must be key=value, with a key among {', '.join(option_names(method))}")
        check_option(shown, name, method)
        try:
            options[name] = parse_value(value.strip())
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from None
    return options


def split_entries(text: str) -> list[str]:
    """Splits `a,b:x=1,y=3:20,c` into `a`, `b:x=1,y=3:20` and `c`: options follow the row that they belong to."""
    parts: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if parts and "=" in piece and ":" not in piece.partition("=")[0]:
            parts[-1] += f",{piece}"
        elif piece:
            parts.append(piece)
    return list(dict.fromkeys(parts))


# -- rows ----------------------------------------------------------------------------------------------------------


def _spelled(label: str, parts: Sequence[str]) -> str:
    return f"{label}{',' if ':' in label else ':'}{','.join(parts)}" if parts else label


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the comparison; before `points`, possibly a sweep.

    Attributes:
      label: names it in records, tables and figures; unique in a run.
      method: a key of `METHODS`.
      options: options of request and method, where they differ from the run's common ones, and `OURS`. Before
        `points`, a tuple holds the values of a sweep, and a mapping the values by size of the target.
      sweep: the sweep that it is a point of, whose best point stands for it in the summary; empty for none.
      optional: left out, with a note, if it cannot run here.
    """

    label: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sweep: str = ""
    optional: bool = dataclasses.field(default=False, compare=False)

    @property
    def batch(self) -> int:
        """Questions that are answered together."""
        return self.options.get(BATCH, 1)

    def changed(self, options: Mapping[str, Any]) -> Row:
        """Returns a copy with other options, which the label spells; None leaves an option out."""
        swept = [name for name, value in options.items() if isinstance(value, tuple)]
        fixed = {name: value for name, value in options.items() if name not in swept}
        spelled = [f"{name}={value}" for name, value in fixed.items() if value is not None or name not in self.options]
        label = _spelled(self.label, spelled)
        sweep = _spelled(label, swept) if swept else label if self.sweep else ""
        return Row(label, self.method, {**self.options, **options}, sweep)

    def points(self, target: str | None = None) -> list[Row]:
        """Returns the product of its sweeps, with the options for this target."""
        options = for_size(self.options, target, self.label)
        swept = {name: dict.fromkeys(values) for name, values in options.items() if isinstance(values, tuple)}
        if math.prod(map(len, swept.values())) > MOST_POINTS:
            raise ValueError(f"{self.label}: a sweep has at most {MOST_POINTS} points")
        rows = []
        for values in itertools.product(*swept.values()):
            point = dict(zip(swept, values))
            label = _spelled(self.label, [f"{name}={value}" for name, value in point.items()])
            rows.append(Row(label, self.method, {**options, **point}, self.sweep if swept else "", self.optional))
        return rows

    def config(self, common: GenerationConfig) -> GenerationConfig:
        """Returns the request, with the run's common options where the row has none, checked."""
        fields = {field.name: field for field in dataclasses.fields(METHODS[self.method])}
        # Common options are for the methods that take them.
        values = {name: getattr(common, name) for name in REQUEST}
        values |= {name: value for name, value in common.options.items() if name in fields}
        values |= {name: value for name, value in self.options.items() if name not in OURS}
        config = GenerationConfig(self.method, **values)
        try:
            config.validate()
            for name, value in config.options.items():
                if value is not None:
                    check_value(fields[name], value)
            Corpus(self.options.get(CORPUS, 1))
            if not isinstance(self.batch, int) or self.batch < 1:
                raise ValueError(f"batch {self.batch}: must be a positive integer")
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None
        return config


VANILLA = Row(BASELINE, BASELINE)
PLAIN_ROWS = {method: Row(method, method) for method in METHODS}
"""Methods with their defaults."""


def for_size(options: Mapping[str, Any], target: str | None, label: str) -> dict[str, Any]:
    """Returns the options, those with a value per size of the target (`{7B: 0.5, other: 0.45}`) resolved."""
    sizes = re.findall(r"(?<![\d.])(\d+(?:\.\d+)?B)(?![a-z])", str(target), re.IGNORECASE)
    size = sizes[-1].upper() if sizes else None
    resolved = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            if size not in value and "other" not in value:
                known = f"known for {', '.join(map(str, value))}; this target: {target}"
                raise ValueError(f"{label}: {name}: {known} (--set ROW:{name}=..., or leave the row out)")
            value = value.get(size, value.get("other"))
        resolved[name] = value
    return resolved


@dataclasses.dataclass(frozen=True)
class RowEntry(CommandOptions):
    """A mapping in a file's `methods`."""

    method: str = option("", "method", choices=tuple(METHODS))
    label: str | None = option(None, "name of the row")
    options: Mapping | None = option(None, "options of the request and of the method")
    sweep: Mapping | None = option(None, "values by option: a list, or text such as 3:20")

    def row(self) -> Row:
        """Returns the row, unexpanded."""
        options = dict(self.options or {})
        for name, values in (self.sweep or {}).items():
            values = parse_value(values) if isinstance(values, str) else values
            if not isinstance(values, (list, tuple)):
                raise ValueError(f'sweep: {name}: must be a list, or a range in quotes like "3:20"')
            options[name] = tuple(values)
        for name in options:
            check_option("options", name, self.method)
        if self.label is None:
            return Row(self.method, self.method).changed(options)
        return Row(self.label, self.method, options, self.label if self.sweep else "")


def parse_row(text: str, known: Mapping[str, Row], shown: str) -> Row:
    """Returns the row that `NAME` or `NAME:key=value,...` stands for; messages begin with `shown`."""
    if text in known:  # a label may have a colon
        return known[text]
    name, _, rest = text.partition(":")
    if name not in known:
        raise ValueError(f"{shown}: there is no such row; rows: {', '.join(known)}, or {ALL}")
    row = known[name]
    return row.changed(parse_options(shown, rest.split(","), row.method)) if rest else row


def select_rows(
    entries: Sequence[str], sweeps: Sequence[str], file_rows: Sequence[Row], changes: Sequence[str], target: str | None
) -> list[Row]:
    """Returns the rows of a run, sweeps expanded, equal ones merged, `vanilla` left out (it always runs).

    Args:
      entries: `--methods`: names of rows or methods with options, or `all`.
      sweeps: `--sweep`: the same, beside those.
      file_rows: rows of the file, unexpanded.
      changes: `--set ROW:key=value`.
      target: whose size some options depend on.

    Raises:
      ValueError: an unknown row, method or option, two different rows of one label, or no row at all.
    """
    known = PLAIN_ROWS | {row.label: row for row in file_rows}
    names = {text if text in known else text.partition(":")[0] for text in (*entries, *sweeps)}
    for text in changes:
        name, _, pair = text.partition(":")
        if name not in known or not {name, ALL} & names:
            raise ValueError(f"--set {text}: there is no such row; rows: {', '.join(sorted(names))}")
        options = parse_options(f"--set {text}", [pair], known[name].method)
        known[name] = dataclasses.replace(known[name], options={**known[name].options, **options})
    chosen = [parse_row(text, known, f"--methods {text}") for text in entries if text != ALL]
    chosen += [parse_row(text, known, f"--sweep {text}") for text in sweeps]
    if ALL in entries:
        chosen += [dataclasses.replace(known[name], optional=True) for name in METHODS if name not in entries]
    return merge_rows([point for row in chosen for point in row.points(target)])


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows by label, `vanilla` left out; raises ValueError: two of one label differ, or there is none."""
    kept: dict[str, Row] = {}
    for row in rows:
        if row == VANILLA:
            continue
        other = kept.setdefault(row.label, row)
        if (other.method, other.options) != (row.method, row.options) or row.label == BASELINE:
            raise ValueError(f"{row.label}: two rows have this label; give one of them another label")
        if row.sweep:
            kept[row.label] = row
    if not kept:
        raise ValueError(f"--methods: {BASELINE} is what others are compared with, and always runs; name one beside it")
    return list(kept.values())


def all_options(config: GenerationConfig) -> dict[str, Any]:
    """Returns every option of a request and of every method; those without a value are None."""
    names = dict.fromkeys((*REQUEST, *option_names()))
    return {name: getattr(config, name) if name in REQUEST else config.options.get(name) for name in names}


def check_common(common: GenerationConfig, rows: Sequence[Row]) -> None:
    """Raises ValueError: a common option that all rows ignore; the message names the methods that take it."""
    methods = {row.method for row in rows}
    for name in common.options:
        takers = [method for method, options in METHODS.items() if name in options.names()]
        if methods and not methods & set(takers):
            raise ValueError(f"--set {name}: {', '.join(sorted(methods))} ignore it; {', '.join(takers)} take it")
