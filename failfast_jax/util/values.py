"""Numbers, texts and lists read from files, with checks of type and range."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from failfast_jax.errors import ConfigError, quoted

LARGEST_ID = 2**31 - 1
"""The largest token id: ids are int32."""
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-30, 1e30
"""Bounds of positive numbers: models calculate in float32."""
REQUIRED: Any = object()

Where = str | os.PathLike[str]


def asset(name: str) -> dict[str, Any]:
    """Reads a TOML file among the package's `assets`."""
    return tomllib.loads((Path(__file__).parents[1] / "assets" / name).read_text(encoding="utf-8"))


def refusal(raw: Mapping[str, Any], key: str, where: Where, rule: str) -> ConfigError:
    """Returns the error for a key whose value breaks a rule, such as "must be a text"."""
    got = f"got {quoted(raw[key])}" if key in raw else "and it is missing"
    return ConfigError(f"{where}: key {quoted(key)} {rule}, {got}")


def is_number(value: Any, kind: type, least: float, most: float) -> bool:
    """True if a value is a number of that kind in that range; NaN is in none, and `true` is no number."""
    return type(value) in ((int,) if kind is int else (int, float)) and least <= value <= most


def number(
    raw: Mapping[str, Any],
    key: str,
    where: Where,
    kind: type = int,
    *,
    least: float = 1,
    most: float = LARGEST_ID,
    default: Any = REQUIRED,
) -> Any:
    """Returns the number `raw[key]`.

    Args:
      raw: an object of a file.
      where: the file, for messages.
      kind: int or float; a float may be written as a whole number.
      least: minimum.
      most: maximum.
      default: returned if the key is missing or null; REQUIRED: the key must be present.

    Raises:
      ConfigError: the number is missing, of another type or out of range.
    """
    value = raw.get(key)
    if value is None and default is not REQUIRED:
        return default
    if not is_number(value, kind, least, most):
        rule = f"must be an integer from {least}" if kind is int else f"must be a number from {least}"
        raise refusal(raw, key, where, f"{rule} to {most}")
    return kind(value)


def flag(raw: Mapping[str, Any], key: str, where: Where, default: bool | None = False) -> bool | None:
    """Returns the truth value `raw[key]`, or `default` if it is missing or null.

    Raises:
      ConfigError: the value is no truth value.
    """
    value = raw.get(key)
    if value is not None and not (type(value) in (bool, int) and value in (0, 1)):
        raise refusal(raw, key, where, "must be true or false")
    return default if value is None else bool(value)


def text(raw: Mapping[str, Any], key: str, where: Where, default: Any = REQUIRED) -> Any:
    """Returns the text `raw[key]`, or `default` if it is missing or null.

    Raises:
      ConfigError: the value is no text.
    """
    value = raw.get(key)
    if value is None and default is not REQUIRED:
        return default
    if not isinstance(value, str):
        raise refusal(raw, key, where, "must be a text")
    return value


def entries(raw: Mapping[str, Any], key: str, where: Where, kind: type, default: Any = REQUIRED) -> Any:
    """Returns the list `raw[key]`, whose entries all have one type, or `default` if it is missing or null.

    Raises:
      ConfigError: the value is no list, or has an entry of another type.
    """
    value = raw.get(key)
    if value is None and default is not REQUIRED:
        return default
    names = {str: "texts", int: "integers", float: "numbers"}
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, list) or not all(type(entry) in kinds for entry in value):
        raise refusal(raw, key, where, f"must be a list of {names[kind]}")
    return value
