"""A hook of MkDocs: tables of all methods' options, from the dataclasses that declare them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from failfast_jax.drafters import all_options
from failfast_jax.options import MethodOptions

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

MARK = "<!-- options of methods -->"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Puts the tables where `MARK` stands."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n\n".join(table(name, options) for name, options in all_options().items()))


def table(method: str, options: type[MethodOptions]) -> str:
    """A method's options, a row each. The help states a default of None in words."""
    lines = [f"#### `{method}`", "", f"{options.summary[0].upper()}{options.summary[1:]}.", ""]
    fields = dataclasses.fields(options)
    if not fields:
        return "\n".join([*lines, "It has none."])
    lines += ["| option | default | |", "| --- | --- | --- |"]
    for field in fields:
        declared = field.metadata["option"]
        default = "" if field.default is None else f"`{field.default}`"
        limits = (("from", declared.least), ("to", declared.most))
        bounds = [f"{word} {bound}" for word, bound in limits if bound is not None]
        text = declared.help.replace("|", "\\|") + (f"; {' '.join(bounds)}" if bounds else "")
        lines.append(f"| `{field.name}` | {default} | {text} |")
    return "\n".join(lines)
