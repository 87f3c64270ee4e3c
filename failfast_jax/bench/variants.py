"""What a benchmark compares: methods with their options, written `method:key=value,...`, and sweeps over options."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from failfast_jax.drafters import METHODS
from failfast_jax.drafters.suffix import Corpus
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.options import check_value, flag_of

BASELINE = "vanilla"
PAPER_SWEEP = "3:20"
"""Draft lengths among which the paper picks the best for each dataset, for drafts of fixed length."""
MOST_POINTS = 1000
"""Of a sweep."""
SWEPT = {"ar": "ar", "fast-dllm+": "fast-dllm"}
"""Names in `--methods` whose draft length a bare `--sweep a:b` chooses, and their methods."""
CORPUS = "corpus"
"""Option of `suffix` here: tokens of a corpus of earlier questions and answers, which the run fills as it goes."""
DRAFTER = "drafter"
"""Option of methods with a model here: the variant's own drafter, a path or Hub id."""
THETA = "rope_theta_drafter"
"""Likewise: the base frequency of its drafter's rotary embedding, in place of the folder's."""
BATCH = "batch"
"""Option of every method here: questions that are answered together, by the row and by its `vanilla`."""
OURS = (CORPUS, DRAFTER, THETA, BATCH)


# -- options of requests and of methods ----------------------------------------------------------------------------

_REQUEST = [f.name for f in dataclasses.fields(GenerationConfig) if f.name not in ("method", "options")]


def option_names(method: str | None = None) -> list[str]:
    """Names of the options of every request (`max_new_tokens` has a flag of its own) and of a method, or of all."""
    kinds = METHODS.values() if method is None else (METHODS[method],)
    own = [name for kind in kinds for name in kind.names()] + ([CORPUS] if method == "suffix" else [])
    own += [DRAFTER, THETA] if method is not None and METHODS[method].kinds else []
    own += [] if method is None else [BATCH]
    return list(dict.fromkeys([*(name for name in _REQUEST if name != "max_new_tokens"), *own]))


def changed_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a request, `max_new_tokens` apart, that differ from their defaults."""
    default = GenerationConfig(max_new_tokens=config.max_new_tokens)
    common = {name: getattr(config, name) for name in _REQUEST if getattr(config, name) != getattr(default, name)}
    return common | {name: value for name, value in config.options.items() if value is not None}


def all_options(config: GenerationConfig) -> dict[str, Any]:
    """Every option of a request and of every method; those that are not given are None."""
    names = dict.fromkeys((*_REQUEST, *option_names()))
    return {name: getattr(config, name) if name in _REQUEST else config.options.get(name) for name in names}


def check_option(shown: str, name: str, method: str | None = None) -> None:
    """Raises ValueError, with a message that begins with `shown`, if a method (or all of them) has no such option."""
    if name not in option_names(method):
        of_method = f" of {method}" if method else ""
        raise ValueError(f"{shown}: there is no option {name!r}{of_method}; options: {', '.join(option_names(method))}")


def value_of(text: str) -> Any:
    """`none`, `true`, `false`, a number, or else text."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def parse_options(shown: str, pairs: Iterable[str], method: str | None = None) -> dict[str, Any]:
    """Options from `key=value`; dashes in a key read as underscores.

    Raises:
      ValueError: no such option; the message begins with `shown`.
    """
    options = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"{shown}: {text} must be key=value, with a key among {', '.join(option_names(method))}")
        check_option(shown, name, method)
        options[name] = value_of(value.strip())
    return options


# -- variants and sweeps -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """One column of the comparison.

    Attributes:
      label: names it in records, tables and figures; unique in a run.
      method: of `METHODS`.
      options: of the request and of the method, where they differ from the run's common ones, and `OURS`.
      sweep: the sweep that it is a point of, whose best point stands for it in the summary; empty for none.
    """

    label: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sweep: str = ""

    @property
    def batch(self) -> int:
        """Questions that are answered together."""
        return self.options.get(BATCH, 1)

    def config(self, common: GenerationConfig) -> GenerationConfig:
        """The request, with the run's common options where the variant has none.

        Raises:
          ValueError: a value out of its range; the message names the variant.
        """
        fields = {field.name: field for field in dataclasses.fields(METHODS[self.method])}
        # Common options are for the methods that take them.
        values = {name: getattr(common, name) for name in _REQUEST}
        values |= {name: value for name, value in common.options.items() if name in fields}
        values |= {name: value for name, value in self.options.items() if name not in OURS}
        config = GenerationConfig(self.method, **values)
        try:
            config.validate()
            for name in ("ignore_eos", "exact"):
                if not isinstance(values[name], bool):
                    raise ValueError(f"{flag_of(name)} {values[name]}: must be true or false")
            for name, value in config.options.items():
                if value is not None:
                    check_value(fields[name], value)
            Corpus(self.options.get(CORPUS, 1))
            if not isinstance(self.batch, int) or self.batch < 1:
                raise ValueError(f"batch {self.batch}: must be a positive integer")
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None
        return config


VANILLA = Variant(BASELINE, BASELINE)


def make_variant(
    method: str, options: Mapping[str, Any] | None = None, label: str | None = None, sweep: str = "", *, shown: str
) -> Variant:
    """A variant whose label, unless given, spells its options.

    Raises:
      ValueError: an unknown method or option; the message begins with `shown`.
    """
    if method not in METHODS:
        raise ValueError(f"{shown}: must be among {', '.join(dict.fromkeys((*METHODS, *SWEPT)))}, or all")
    options = dict(options or {})
    for name in options:
        check_option(shown, name, method)
    spelled = ",".join(f"{name}={value}" for name, value in options.items())
    return Variant(label or (f"{method}:{spelled}" if spelled else method), method, options, sweep)


def sweep_values(shown: str, text: str) -> list[Any]:
    """The values of `FIRST:LAST` (both ends included) or `v1|v2|...`.

    Raises:
      ValueError: neither; the message begins with `shown`.
    """
    if ":" not in text:
        return [value_of(part.strip()) for part in text.split("|")]
    first, _, last = text.partition(":")
    if not re.fullmatch(r"\s*\d{1,9}\s*:\s*\d{1,9}\s*", text) or not 0 <= int(last) - int(first) < MOST_POINTS:
        raise ValueError(f"{shown}: a range must be FIRST:LAST, of at most {MOST_POINTS} integers")
    return list(range(int(first), int(last) + 1))


def sweep(
    name: str,
    method: str,
    key: str,
    values: Iterable[Any],
    options: Mapping[str, Any] | None = None,
    *,
    shown: str,
    row: str | None = None,
) -> list[Variant]:
    """The points of a sweep over the option `key`; `options` are those of every point. Labels spell them, or begin with
    `row` in their place."""
    points = {str(value): value for value in values}
    labels = {text: row and f"{row}{',' if ':' in row else ':'}{key}={text}" for text in points}
    return [
        make_variant(method, {**(options or {}), key: value}, labels[text], sweep=name, shown=shown)
        for text, value in points.items()
    ]


def split_methods(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` as `a`, `b:x=1,y=2` and `c`: options follow the method that they belong to."""
    parts: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if parts and "=" in piece and ":" not in piece:
            parts[-1] += f",{piece}"
        elif piece:
            parts.append(piece)
    return list(dict.fromkeys(parts))


def parse_method(text: str, lengths: str | None = None) -> list[Variant]:
    """What an entry of `--methods` names: a variant, or a sweep over draft lengths.

    Args:
      lengths: those that `ar` and `fast-dllm+` are swept over; `fast-dllm+` always is.

    Raises:
      ValueError: an unknown method or option.
    """
    shown = f"--methods {text}"
    name, _, rest = text.partition(":")
    method = SWEPT.get(name, name)
    options = parse_options(shown, rest.split(",") if rest else (), method) if method in METHODS else {}
    if name not in SWEPT or "spec_len" in options or (name == method and lengths is None):
        return [make_variant(method, options, shown=shown)]
    values = sweep_values(f"--sweep {lengths}", lengths or PAPER_SWEEP)
    return sweep(text, method, "spec_len", values, options, shown=shown)


def split_sweep(text: str) -> tuple[str, str, str, str]:
    """`method:key=value,key=v1|v2|...` as the method (or row), the options before the last, its key and its values."""
    place, _, values = text.rpartition("=")
    method, _, rest = place.partition(":")
    options, _, key = rest.rpartition(",")
    return method, options, key.strip().replace("-", "_"), values


def parse_sweep(text: str) -> list[Variant]:
    """The points of `--sweep method:key=v1|v2|...`; further options, of every point, stand in front of the key.

    Raises:
      ValueError: an unknown method or option.
    """
    shown = f"--sweep {text}"
    method, rest, key, values = split_sweep(text)
    if method not in METHODS or method == BASELINE:
        raise ValueError(f"{shown}: must be FIRST:LAST or method:key=values, with a method of {', '.join(METHODS)}")
    options = parse_options(shown, rest.split(",") if rest else (), method)
    return sweep(f"{method}:{key}", method, key, sweep_values(shown, values), options, shown=shown)


def check_labels(variants: Sequence[Variant]) -> list[Variant]:
    """The variants, `vanilla` left out (it always runs) and equal ones merged.

    Raises:
      ValueError: two different variants of one label.
    """
    kept: dict[str, Variant] = {}
    for variant in variants:
        if variant == VANILLA:
            continue
        other = kept.setdefault(variant.label, variant)
        if (other.method, other.options) != (variant.method, variant.options) or variant.label == BASELINE:
            raise ValueError(f"{variant.label}: two variants have this label; give one of them another label")
        if variant.sweep:
            kept[variant.label] = variant
    return list(kept.values())


def check_common(common: GenerationConfig, variants: Sequence[Variant]) -> None:
    """Checks that each common option serves at least one of the variants.

    Raises:
      ValueError: one that all of them ignore; the message names the methods that take it.
    """
    methods = {variant.method for variant in variants}
    for name in common.options:
        takers = [method for method, options in METHODS.items() if name in options.names()]
        if methods and not methods & set(takers):
            raise ValueError(f"--set {name}: {', '.join(sorted(methods))} ignore it; {', '.join(takers)} take it")
