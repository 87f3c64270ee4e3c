"""What a benchmark compares: methods with their options, written `method:key=value,...`, and sweeps over options."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS

BASELINE = "vanilla"
PAPER_SWEEP = "3:20"
"""Draft lengths among which the paper picks the best for each dataset, for drafts of fixed length."""
SWEPT = {"ar": "ar", "fast-dllm+": "fast-dllm"}
"""Names in `--methods` whose draft length a bare `--sweep a:b` chooses, and their methods."""
CORPUS = "corpus"
"""Option of `suffix` here: tokens of a corpus of earlier questions and answers, which the run fills as it goes."""


# -- options: what `GenerationConfig` has -------------------------------------------------------------------------


def option_fields() -> list[str]:
    """Fields of `GenerationConfig` that an option may name: all but those with a flag of their own."""
    return [f.name for f in dataclasses.fields(GenerationConfig) if f.name not in ("method", "max_new_tokens")]


def option_types(name: str) -> tuple[type, ...]:
    """Types that an option's values may have."""
    hint = int if name == CORPUS else typing.get_type_hints(GenerationConfig)[name]
    return typing.get_args(hint) or (hint,)


def changed_options(config: GenerationConfig) -> dict[str, Any]:
    """The options of a request that differ from their defaults."""
    default = GenerationConfig()
    return {k: getattr(config, k) for k in option_fields() if getattr(config, k) != getattr(default, k)}


def check_option(shown: str, name: str, method: str | None = None) -> None:
    """Checks that there is such an option.

    Raises:
      ValueError: there is none, or not for this method; the message begins with `shown`.
    """
    if name == CORPUS and method is not None:
        if method != "suffix":
            raise ValueError(f"{shown}: only suffix drafts from a corpus, not {method}")
    elif name not in option_fields():
        raise ValueError(f"{shown}: GenerationConfig has no option {name!r} (options: {', '.join(option_fields())})")


def parse_option(shown: str, name: str, text: str, method: str | None = None) -> Any:
    """The value of an option; `shown` is how it stands on the command line.

    Raises:
      ValueError: no such option, or text that its type cannot hold.
    """
    check_option(shown, name, method)
    kinds = option_types(name)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shown}: must be true or false")
        return text.lower() == "true"
    for kind, said in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{shown}: must be {said}") from None
    return text


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
      options: fields of `GenerationConfig` that differ from the run's common ones, and `corpus`.
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
        options = {name: value for name, value in self.options.items() if name != CORPUS}
        config = dataclasses.replace(common, method=self.method, **options)
        try:
            config.validate()
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
