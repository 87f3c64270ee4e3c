"""What a benchmark compares: methods with their options, written `method:key=value,...`, and sweeps over options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS
from failfast_jax.options import check_value, type_of

BASELINE = "vanilla"
PAPER_SWEEP = "3:20"
"""Draft lengths among which the paper picks the best for each dataset, for drafts of fixed length."""
SWEPT = {"ar": "ar", "fast-dllm+": "fast-dllm"}
"""Names in `--methods` whose draft length a bare `--sweep a:b` chooses, and their methods."""
CORPUS = "corpus"
"""Option of `suffix` here: tokens of a corpus of earlier questions and answers, which the run fills as it goes."""


# -- options of requests and of methods ----------------------------------------------------------------------------

_REQUEST = {f.name: f for f in dataclasses.fields(GenerationConfig)}
_OWN_FLAGS = ("method", "max_new_tokens", "options")


def method_fields(method: str | None = None) -> dict[str, dataclasses.Field]:
    """The options of a method, or of all of them, by name."""
    chosen = METHODS.values() if method is None else (METHODS[method],)
    return {field.name: field for options in chosen for field in dataclasses.fields(options)}


def option_fields(method: str | None = None) -> list[str]:
    """Names that an option may have: those of every request without a flag of their own, and `method_fields`."""
    return [*(name for name in _REQUEST if name not in _OWN_FLAGS), *method_fields(method)]


def changed_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a request that differ from their defaults."""
    default = GenerationConfig()
    common = {k: getattr(config, k) for k in _REQUEST if k not in _OWN_FLAGS}
    common = {k: value for k, value in common.items() if value != getattr(default, k)}
    return common | {k: value for k, value in config.options.items() if value is not None}


def all_options(config: GenerationConfig) -> dict[str, Any]:
    """Every option of a request and of every method; those that are not given are None."""
    common = {name: getattr(config, name) for name in _REQUEST if name not in ("method", "options")}
    return common | {name: config.options.get(name) for name in method_fields()}


def check_option(shown: str, name: str, method: str | None = None) -> None:
    """Checks that there is such an option.

    Raises:
      ValueError: there is none, or not for this method; the message begins with `shown`.
    """
    if name == CORPUS and method is not None:
        if method != "suffix":
            raise ValueError(f"{shown}: only suffix drafts from a corpus, not {method}")
    elif name not in option_fields():
        raise ValueError(f"{shown}: there is no option {name!r} (options: {', '.join(option_fields())})")
    elif method is not None and name not in option_fields(method):
        takers = [other for other, options in METHODS.items() if name in options.names()]
        raise ValueError(f"{shown}: {method} ignores {name}; {', '.join(takers)} take it")


def _kind_of(name: str) -> str:
    """`int`, `float`, `bool` or `str`."""
    if name == CORPUS:
        return "int"
    return type_of(method_fields().get(name) or _REQUEST[name])


def parse_option(shown: str, name: str, text: str, method: str | None = None) -> Any:
    """The value of an option; `shown` is how it stands on the command line.

    Raises:
      ValueError: no such option, or text that its type cannot hold.
    """
    check_option(shown, name, method)
    kind = _kind_of(name)
    if name in method_fields() and text.lower() == "none":
        return None
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shown}: must be true or false")
        return text.lower() == "true"
    parse, said = {"int": (int, "an integer"), "float": (float, "a number"), "str": (str, "text")}[kind]
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{shown}: must be {said}") from None


def parse_pair(shown: str, text: str, method: str | None = None) -> tuple[str, Any]:
    """`key=value` as an option and its value; dashes in the key read as underscores."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{shown}: must be key=value, with a key among {', '.join(option_fields())}")
    name = name.strip().replace("-", "_")
    return name, parse_option(shown, name, value.strip(), method)


def parse_options(pairs: Iterable[tuple[str, str]], method: str | None = None) -> dict[str, Any]:
    """Options from `(how it is shown, key=value)`; none may be given twice."""
    options: dict[str, Any] = {}
    for shown, text in pairs:
        name, value = parse_pair(shown, text, method)
        if name in options:
            raise ValueError(f"{shown}: {name} was given before")
        options[name] = value
    return options


# -- variants and sweeps -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Variant:
    """One column of the comparison.

    Attributes:
      label: names it in records, tables and figures; unique in a run.
      method: of `METHODS`.
      options: of the request and of the method, where they differ from the run's common ones, and `corpus`.
      sweep: the sweep that it is a point of; empty for none.
    """

    label: str
    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sweep: str = ""

    def config(self, common: GenerationConfig) -> GenerationConfig:
        """The request, with the run's common options where the variant has none.

        Raises:
          ValueError: a value out of its range; the message names the variant.
        """
        given = {name: value for name, value in self.options.items() if name != CORPUS}
        fields = method_fields(self.method)
        # Common options are for the methods that take them.
        options = {name: value for name, value in common.options.items() if name in fields}
        options |= {name: value for name, value in given.items() if name in fields}
        request = {name: value for name, value in given.items() if name not in fields}
        config = dataclasses.replace(common, method=self.method, options=options, **request)
        try:
            config.validate()
            for name, value in options.items():
                if value is not None:
                    check_value(fields[name], value)
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
    for name, value in options.items():
        check_option(shown, name, method)
        if name == CORPUS and (not isinstance(value, int) or not 1 <= value < 2**24):
            raise ValueError(f"{shown}: {CORPUS} must be a number of tokens from 1 to {2**24 - 1}")
    spelled = ",".join(f"{name}={value}" for name, value in options.items())
    return Variant(label or (f"{method}:{spelled}" if spelled else method), method, options, sweep)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One option over several values; the best value per dataset stands for it in the summary.

    Attributes:
      name: row of the summary.
      method, options: of every point.
      key, values: the option that is swept.
    """

    name: str
    method: str
    key: str
    values: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def variants(self) -> list[Variant]:
        return [
            make_variant(self.method, {**self.options, self.key: v}, sweep=self.name, shown=f"sweep {self.name}")
            for v in self.values
        ]


def parse_values(shown: str, key: str, text: str, method: str | None = None) -> tuple[Any, ...]:
    """`a:b[:step]` (both ends included) or `v1|v2|...` as values of the option `key`.

    Raises:
      ValueError: neither, or a value that the option cannot hold.
    """
    check_option(shown, key, method)
    if ":" not in text:
        return tuple(dict.fromkeys(parse_option(shown, key, part.strip(), method) for part in text.split("|")))
    try:
        first, last, *step = (int(part) for part in text.split(":"))
        values = tuple(range(first, last + 1, *step))
    except (TypeError, ValueError):
        raise ValueError(f"{shown}: a range must be FIRST:LAST or FIRST:LAST:STEP, of integers") from None
    if not values:
        raise ValueError(f"{shown}: the range holds no value")
    return tuple(parse_option(shown, key, str(value), method) for value in values)


def split_methods(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` as `a`, `b:x=1,y=2` and `c`: options follow the method that they belong to."""
    parts: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if parts and "=" in piece and ":" not in piece:
            parts[-1] += f",{piece}"
        elif piece:
            parts.append(piece)
    return list(dict.fromkeys(parts))


def parse_methods(texts: Sequence[str], sweeps: Sequence[str] = ()) -> tuple[list[Variant], list[Sweep]]:
    """Settings and sweeps from `--methods` (split) and `--sweep`.

    A bare range in `sweeps` sweeps the draft length of `ar` and of `fast-dllm+`; `method:key=values` sweeps any
    option of any method. `fast-dllm+` is always swept.

    Raises:
      ValueError: an unknown method or option, a value out of its type, or a sweep that nothing uses.
    """
    bare = [text for text in sweeps if "=" not in text]
    if len(bare) > 1:
        raise ValueError(f"--sweep {bare[1]}: a range of draft lengths was given before ({bare[0]})")
    variants, swept = [], []
    for text in texts:
        shown = f"--methods {text}"
        name, colon, rest = text.partition(":")
        pairs = [(shown, pair) for pair in rest.split(",")] if colon else []
        options = parse_options(pairs, SWEPT.get(name, name))
        if name in SWEPT and "spec_len" not in options and (bare or name != SWEPT[name]):
            lengths = bare[0] if bare else PAPER_SWEEP
            values = parse_values(f"--sweep {lengths}", "spec_len", lengths, SWEPT[name])
            swept.append(Sweep(text, SWEPT[name], "spec_len", values, options))
        else:
            variants.append(make_variant(name, options, shown=shown))
    if bare and not swept:
        raise ValueError(
            f"--sweep {bare[0]}: sweeps the draft length of {' and '.join(SWEPT)}; --methods names neither"
        )
    for text in sweeps:
        if text in bare:
            continue
        shown = f"--sweep {text}"
        method, colon, rest = text.partition(":")
        key, _, values = rest.partition("=")
        key = key.strip().replace("-", "_")
        if not colon or method not in METHODS or method == BASELINE:
            raise ValueError(f"{shown}: must be FIRST:LAST or method:key=values, with a method of {', '.join(METHODS)}")
        swept.append(Sweep(f"{method}:{key}", method, key, parse_values(shown, key, values, method)))
    return variants, swept


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
        if variant.sweep and other.sweep and variant.sweep != other.sweep:
            raise ValueError(f"{variant.label}: a point of two sweeps, {other.sweep} and {variant.sweep}")
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
