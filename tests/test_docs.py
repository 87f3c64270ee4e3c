"""Pages: complete, and about code, files, flags and messages that exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from fuzzed_commands import main_of

from failfast_jax import drafters
from failfast_jax.drafters import all_options
from failfast_jax.util.command_line import Parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tpu_scripts/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def test_messages_that_are_explained_exist():
    """By all pieces that are not filled in; JAX's, XLA's and the system's own messages are left out."""
    page = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    nodes = [node for path in (ROOT / "failfast_jax").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    cells = [re.sub(r"\(`.*?\)", "", cell) for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE)]
    quoted = re.findall(r"(XLA's |JAX's |JAX's warning )?`([^`]+)`", "\n".join(cells))
    messages = [message for source, message in quoted if not source]
    assert len(messages) > 45
    split = [re.split(r"\.\.\.|: |\b(?:[A-Zkmnv]|TPU)\b|, only", message) for message in messages]
    pieces = [[piece.strip(" :,;()'") for piece in parts] for parts in split]
    assert [parts for parts in pieces if max(map(len, parts)) < 6] == []
    assert [
        part for parts in pieces for part in parts if len(part) > 3 and not any(part in text for text in texts)
    ] == []


def test_links_of_pages_outside_the_site_lead_somewhere():
    """`mkdocs build --strict` checks the links of the others."""
    wrong = []
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tpu_scripts/README.md"):
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
        relative = [link for link in links if "://" not in link]
        assert relative or page != "README.md"
        wrong += [f"{page}: {link}" for link in relative if not ((ROOT / page).parent / link).exists()]
    assert not wrong, "\n".join(wrong)


def test_the_notebook_is_stored_without_outputs():
    notebook = json.loads((ROOT / "examples" / "failfast.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def test_the_tests_that_are_named_exist():
    pages = (".ci/versions", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "tests/fixtures/golden/README.md")
    for page in (*(ROOT / name for name in pages), *(ROOT / "docs").glob("*.md")):
        for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), f"{page.name}: {path}::{name}"


def test_files_that_pages_name_exist():
    """Python files in backticks, from the root or from the package; `NAME.py` stands for any."""
    paths = {page: re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(map(len, paths.values())) > 40
    added = {"failfast_jax/drafters/repeat.py"}  # docs/add-a-method.md adds it
    folders = (ROOT, ROOT / "failfast_jax", ROOT / "examples")
    missing = [
        f"{page.name}: {path}"
        for page, named in paths.items()
        for path in named
        if "NAME" not in path and path not in added and not any((folder / path).is_file() for folder in folders)
    ]
    assert missing == []


def test_the_reference_has_a_table_of_every_method_s_options():
    """The site's hook makes the tables from the dataclasses: name and default of every option, its help and bounds."""
    hook = runpy.run_path(str(ROOT / "docs" / "option_tables.py"))
    page = hook["on_page_markdown"]((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), page=None)
    assert hook["MARK"] not in page
    for method, options in all_options().items():
        section = page.partition(f"#### `{method}`")[2].partition("####")[0]
        rows = re.findall(r"^\| `(\w+)` \| (?:`.+`)? \| .*\w.* \|$", section, re.MULTILINE)
        assert rows == [field.name for field in dataclasses.fields(options)]
    assert "| `tau` | `0.45` | confidence below which a draft stops growing; from 0 to 1 |" in page


# Commands in the pages.


class Parsed(BaseException):
    """The arguments are right; nothing is run."""


def commands(page: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it stands in a block (else in a sentence, where arguments may be left out)."""
    text = page.read_text(encoding="utf-8")
    start = r"python -m (?:failfast_jax|convert|tpu_scripts)\b"
    for block in re.finditer(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        body = block.group(1).replace("\\\n", "  ")
        for command in re.finditer(rf"{start}[^\n]*", body):
            yield text[: block.start(1)].count("\n") + body[: command.start()].count("\n") + 1, command.group(), True
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    for span in re.finditer(r"`([^`]+)`", prose):
        for command in re.finditer(rf"{start}.*", span.group(1), re.DOTALL):
            yield prose[: span.start()].count("\n") + 1, " ".join(command.group().split()), False


ALL_COMMANDS = [
    pytest.param(text, whole, id=f"{page.name}:{line}") for page in PAGES for line, text, whole in commands(page)
]
assert len(ALL_COMMANDS) >= 20


@pytest.mark.parametrize("command, whole", ALL_COMMANDS)
def test_commands_in_the_pages_parse(command, whole, monkeypatch):
    without_dots = re.sub(r"(?<=\s)(\.\.\.|…)(?=\s|$)", "", re.split(r" (?:&&|\|) ", command)[0])
    words = shlex.split(without_dots, comments=True)
    module, arguments = words[2], words[3:]
    if not whole and not arguments:
        assert importlib.util.find_spec(module), module
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, *args):
        parse(self, *args)
        raise Parsed

    def refuse(self, message):
        if not whole and "arguments are required" in message:
            raise Parsed
        raise AssertionError(f"{command}\n{message}")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for parser in (argparse.ArgumentParser, Parser):
        monkeypatch.setattr(parser, "error", refuse)
    # `docs/add-a-method.md` adds this one.
    monkeypatch.setitem(drafters.METHODS, "repeat", drafters.METHODS["lookup"])
    with mock.patch.dict(os.environ), pytest.raises(Parsed):
        main_of(module)(arguments)
