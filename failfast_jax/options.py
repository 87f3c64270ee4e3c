"""Options, declared once for the command line, YAML files and Python keywords: a method's in the method's file.

    @dataclasses.dataclass(frozen=True)
    class LookupOptions(MethodOptions):
        summary = "the text itself"
        lookup_min: int = option(2, "shortest match that it drafts from", least=1, most=32)

        def build(self, site: Site) -> Drafter: ...

Options of the same name mean the same in all methods. A method refuses an option of other methods and names them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from failfast_jax.errors import OptionError
from failfast_jax.util.files import user_path

LONGEST_DRAFT = 512
"""Maximum length: each width that a draft may need is compiled, and longer ones would compile for minutes."""

_TYPES = {"int": (int, np.integer), "float": (int, float, np.number), "bool": (bool,), "str": (str,), "Path": (Path,)}
_TYPES |= {"tuple": (tuple,), "Mapping": (Mapping,)}
_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "Path": "a path"}
_KINDS |= {"tuple": "a list", "Mapping": "a mapping"}


@dataclasses.dataclass(frozen=True)
class Option:
    """Declaration of an option: help text, bounds of its value, and what it goes with.

    Attributes:
      above, below: bounds that are not reached.
      infinite: infinity is a value.
      only: values that other options must have, or fields of the request; refused is only a value beside the default.
      not_below: an option whose value this one's must reach.
      kinds: kinds of drafter model that have it; none: all that the method takes.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    infinite: bool = False
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    not_below: str | None = None
    kinds: tuple[str, ...] = ()


def option(default: Any, help: str, **bounds: Any) -> Any:
    """A field of `MethodOptions`; a default of None stands for one that depends on the models (say it in `help`)."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **bounds)})


@dataclasses.dataclass(frozen=True)
class Site:
    """The surroundings of a drafter.

    Attributes:
      model: the drafter's model; None for methods that need none.
      model_name: its name in errors.
      vocab: ids below it may be drafted.
      platform: `cpu`, `gpu` or `tpu`.
      sampled: whether drafts are samples, for acceptance by rejection.
      exact: whether outputs must be bit-identical.
      chances: prior acceptance of the model's tokens by bin of confidence; None: that of any model.
      corpus: earlier texts that `suffix` drafts from, each ended by -1; None: none.
    """

    model: Any = None
    model_name: str = "the drafter model"
    vocab: int = 0
    platform: str = "cpu"
    sampled: bool = False
    exact: bool = False
    chances: tuple[float, ...] | None = None
    corpus: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """Options of one command, checked."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "option" in field.metadata:
                check_value(field, getattr(self, field.name))

    @classmethod
    def given(cls, args: Any) -> Any:
        """Reads the options from parsed flags; an absent flag leaves the default.

        Raises:
          OptionError: a value out of its range.
        """
        values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of one method; a subclass is its entry in `drafters.METHODS`.

    Class attributes:
      summary: what it drafts with, for help texts.
      kinds: kinds of drafter model that it takes (see `models.drafter_model`); none for methods without a model.
      needs_model: False for methods that take a model and also work without.
      samples: True for methods that serve `--acceptance rejection`: they draft from left to right, in places that do
        not depend on the draw, and keep the distributions that drafts were drawn from.
      top_p: default of `--top-p`.
    """

    summary: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ()
    needs_model: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    top_p: ClassVar[float] = 1.0

    def build(self, site: Site) -> Any:
        """The drafter (`decoding.drafter.Drafter`) of a request.

        Raises:
          OptionError: options that the model cannot serve.
        """
        raise NotImplementedError

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of(
        cls, requested: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, **request: Any
    ) -> MethodOptions:
        """Returns the options of a request, checked: each value alone, then all of them together.

        Args:
          requested: by name; None counts as absent. Names must be `names()`.
          defaults: a drafter's own, in place of the class's (see `merged`).
          request: fields of the request that an option may exclude (`Option.only`).

        Raises:
          OptionError: a value out of its range, or options that contradict each other.
        """
        requested = {name: value for name, value in requested.items() if value is not None}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in (*requested.items(), *(defaults or {}).items()):
            check_value(fields[name], value)
        options = cls(**cls.merged(requested, dict(defaults or {})))
        for name in fields:
            options._check_beside_others(fields[name], {**request, **vars(options)}, name in requested)
        return options

    @classmethod
    def merged(cls, requested: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """Requested options over a drafter's own defaults; a method may decide which defaults give way."""
        return {**defaults, **requested}

    def _check_beside_others(self, field: dataclasses.Field, values: Mapping[str, Any], requested: bool) -> None:
        """Checks `Option.only` and `Option.not_below` of one field."""
        about, value, flag = field.metadata["option"], values[field.name], shown(field.name, values[field.name])
        for other, wanted in about.only.items() if requested and value != field.default else ():
            absent = values[other] is None or values[other] is False
            reason = f"needs {flag_of(other)}" if absent else f"not with {shown(other, values[other])}"
            require(values[other] == wanted, flag, reason)
        least = values.get(about.not_below)
        if value is not None and least is not None:
            require(value >= least, flag, f"must be at least {shown(about.not_below, least)}")

    def check_model(self, site: Site) -> None:
        """Raises OptionError: an option that drafters of the model's kind do not have."""
        for field in dataclasses.fields(self):
            kinds, value = field.metadata["option"].kinds, getattr(self, field.name)
            fine = value == field.default or not kinds or (site.model is not None and site.model.kind in kinds)
            kind = "there is none" if site.model is None else f"{site.model_name} is {site.model.kind}"
            require(fine, shown(field.name, value), f"needs a drafter of kind {' or '.join(kinds)}, {kind}")


def flag_of(name: str) -> str:
    """`spec_len` as `--spec-len`."""
    return "--" + name.replace("_", "-")


def shown(name: str, value: Any) -> str:
    """Returns an option as typed: `--reuse`, `--spec-len 4`."""
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"


def type_of(field: dataclasses.Field) -> str:
    """`int`, `float`, `bool` or `str`."""
    written = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return written.partition(" ")[0]


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Raises OptionError: a value of another type or out of the option's range."""
    about: Option = field.metadata["option"]
    if value is None and field.default is None:
        return
    kind, flag = type_of(field), flag_of(field.name)
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise OptionError(f"{flag} {value!r}: must be {_KINDS[kind]}")
    if about.choices is not None and value not in about.choices:
        raise OptionError(f"{flag} {value}: must be {' or '.join(map(repr, about.choices))}")
    if kind in ("int", "float"):
        within = (about.least is None or value >= about.least) and (about.most is None or value <= about.most)
        inside = (about.above is None or value > about.above) and (about.below is None or value < about.below)
        if not (within and inside) or (kind == "float" and not (about.infinite or abs(value) <= sys.float_info.max)):
            raise OptionError(f"{flag} {value}: must be {_range_of(about, kind)}")


def _range_of(about: Option, kind: str) -> str:
    bounds = about.least if about.above is None else about.above, about.most if about.below is None else about.below
    low, high = (f"{bound:g}" if isinstance(bound, float) else bound for bound in bounds)
    if low is not None and high is not None and about.most != np.finfo(np.float32).max:
        return f"in {'[' if about.above is None else '('}{low}, {high}{']' if about.below is None else ')'}"
    if low is None:
        return "a finite number"
    finite = ", and finite" if kind == "float" and not about.infinite else ""
    return f"{'at least' if about.above is None else 'above'} {low}{finite}"


def require(fine: bool, flag: str, reason: str) -> None:
    """Raises OptionError(`flag`: `reason`) unless `fine`."""
    if not fine:
        raise OptionError(f"{flag}: {reason}")


def add_flags(parser: Any, methods: Mapping[str, type[MethodOptions]]) -> None:
    """Adds one flag for each option of any method; an absent flag is None.

    Args:
      parser: an `argparse` parser or a group of one.
      methods: options by the method's name.
    """
    taken: dict[str, list[tuple[str, dataclasses.Field]]] = {}
    for method, options in methods.items():
        for field in dataclasses.fields(options):
            taken.setdefault(field.name, []).append((method, field))
    for uses in taken.values():
        by_help: dict[str, list[str]] = {}
        for method, field in uses:
            by_help.setdefault(_help_of(field), []).append(method)
        text = "; ".join(f"{', '.join(names)}: {help}" for help, names in by_help.items())
        add_flag(parser, uses[0][1], text)


def add_flags_of(parser: Any, options: type) -> None:
    """Adds one flag for each field (see `option`) of a command's dataclass; an absent flag is None."""
    for field in dataclasses.fields(options):
        add_flag(parser, field)


def add_flag(parser: Any, field: dataclasses.Field, text: str | None = None, **more: Any) -> None:
    """Adds the flag of a field (see `option`); the value of an absent flag is None.

    Args:
      text: the help text; None: that of the field, with its default.
      more: further arguments of `add_argument`.
    """
    kind, about = type_of(field), field.metadata["option"]
    if kind == "bool":
        arguments = {"action": "store_true", "default": None}
    elif about.choices:
        arguments = {"choices": about.choices}
    else:
        parsers = {"int": ("n", int), "float": ("x", float), "Path": ("PATH", user_path)}
        arguments = dict(zip(("metavar", "type"), parsers.get(kind, ("TEXT", str))))
    parser.add_argument(flag_of(field.name), **{**arguments, "help": _help_of(field) if text is None else text, **more})


def _help_of(field: dataclasses.Field) -> str:
    default = field.default
    shown = "" if default is None or default is False else f" ({default})"
    return field.metadata["option"].help + shown
