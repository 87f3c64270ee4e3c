"""House rules that ruff does not hold: imports, names, words, and that every command in the pages parses."""

from __future__ import annotations

import argparse
import ast
import builtins
import collections
import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from failfast_jax import drafters
from failfast_jax.decoding.decode_state import Tree
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.util.command_line import Parser

ROOT = Path(__file__).parents[1]
PACKAGES = ("failfast_jax", "convert", "tpu_scripts")
PAGES = (ROOT / "README.md", ROOT / "tpu_scripts" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MOST_BEHIND, MOST_IMPORTED_TESTS = 10, 1
QUESTION_WORDS = {"What", "Of", "Whether", "How", "Where", "Those"}
BANNED = {"said", "found", "told", "own", "made", "given", "how", "one"}
KEYWORDS = {"jax", "flax", "numpy", "transformers", "tokenizers", "safetensors", "gguf"}
"""Dependencies that must not be shadowed, even if they are not installed."""
KEPT = {"queue", "fast_dllm", "gguf"}
"""Names of modules that programs import and run: `failfast_jax.serving.queue`, `convert.gguf`."""

ROOT_BOTTOM = {"_version", "axes", "errors", "generation_config", "load_options", "options", "prompts", "results"}
ROOT_BOTTOM |= {"template_process", "template_rendering", "text_stream"}
LAYERS = (
    ROOT_BOTTOM | {"util"},
    {"kernels"},
    {"models"},
    {"checkpoints", "decoding"},
    {"public_data", "policy"},
    {"drafters"},
    {"runtime", "default_pair"},
    {"engine"},
    {"__init__", "defaults", "answer_trace"},
    {"serving", "request_flags"},
    {"doctor", "generate", "serve", "chat", "harness", "bench", "train", "convert"},
    {"tpu_scripts"},
)
"""From the bottom up. A module imports from its own part and from lower layers; the bottom is one part."""


def files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, node: ast.AST | int) -> str:
    return f"{path.relative_to(ROOT)}:{node if isinstance(node, int) else node.lineno}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in files(*PACKAGES)}


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Modules of this project that a file imports, wherever in the file it does so."""
    for node in ast.walk(tree_of(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{where(path, node)}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else node.module for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # What is imported by name: "package.module:function".
            names = [node.value.split(":")[0]] if ":" in node.value else []
        yield from ((node, name) for name in names if name in modules())


def place(module: str) -> tuple[int, str]:
    """A module's layer and its part of it."""
    parts = module.split(".")
    name = parts[0] if parts[0] != "failfast_jax" else parts[1] if len(parts) > 1 else "__init__"
    for layer, names in enumerate(LAYERS):
        if name in names:
            return layer, "bottom" if not layer else name
    raise AssertionError(f"{module} stands in no layer")


def test_imports_point_down():
    wrong = []
    for module, path in modules().items():
        layer, part = place(module)
        for node, name in imports(path):
            other_layer, other_part = place(name)
            if other_part != part and other_layer >= layer:
                wrong.append(f"{where(path, node)}: {part} imports {name}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_no_import_circle():
    graph = {module: {name for _, name in imports(path)} - {module} for module, path in modules().items()}

    def reachable(start: str) -> set[str]:
        found, left = set(), list(graph[start])
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += graph[name]
        return found

    reach = {module: reachable(module) for module in graph}
    circles = {tuple(sorted(name for name in reach[module] if module in reach[name])) for module in graph}
    assert circles == {()}, "\n".join(" <-> ".join(circle) for circle in sorted(circles) if circle)


def test_class_and_module_names_are_unique():
    classes, names = collections.defaultdict(list), collections.defaultdict(list)
    for module, path in modules().items():
        if path.stem not in {"__init__", "__main__", *KEPT}:
            names[path.stem].append(module)
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(where(path, node))
    twice = [f"{name}: {', '.join(places)}" for name, places in {**classes, **names}.items() if len(places) > 1]
    assert not twice, "\n".join(twice)
    dependencies = {name for names in metadata.packages_distributions().items() for name in names[:1]} | KEYWORDS
    shadows = {*names} & ({*dependencies, *dir(builtins), *sys.stdlib_module_names}) - KEPT
    assert not shadows


def test_plain_words():
    """Docstrings begin with a verb or a noun; variables are nouns; "after" and not "behind"."""
    docstrings, variables, behind = [], [], []
    for path in files(*PACKAGES):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            behind += [where(path, number)] * len(re.findall(r"\bbehind\b", line, re.IGNORECASE))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                body = ast.get_docstring(node) or ""
                docstrings += [where(path, node.body[0])] if body.split(" ")[0].rstrip(":,") in QUESTION_WORDS else []
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED:
                variables.append(f"{where(path, node)} {node.id}")
            elif isinstance(node, ast.arg) and node.arg in BANNED:
                variables.append(f"{where(path, node)} {node.arg}")
    assert not docstrings + variables, "\n".join(docstrings + variables)
    assert len(behind) <= MOST_BEHIND, "\n".join(behind)


def test_test_files_import_no_other_test_file():
    wrong = []
    for path in files("tests"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                wrong += [f"{where(path, node)}: {name}" for name in names if name.split(".")[-1].startswith("test_")]
    assert len(wrong) <= MOST_IMPORTED_TESTS, "\n".join(wrong)


def test_private_names_are_not_imported():
    """JAX 0.10 has no public name for the simulator of GPU kernels."""
    private = re.compile(r"\s*(?:from|import) .*[. ]_(?!_|version|src)\w")
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files(*PACKAGES, "tests")
        for line in path.read_text(encoding="utf-8").splitlines()
        if private.match(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_annotations_are_checked():
    """The import hook of `conftest` is active: for functions and for dataclasses, not for what JAX rebuilds."""
    draft, lengths = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    assert agreeing_prefix(draft, lengths, jnp.zeros((2, 4), jnp.int32)).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError, match="draft_length"):
        agreeing_prefix(draft, draft, jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(jaxtyping.TypeCheckError, match="size"):
        Tree(tokens=draft, parent=draft, confidence=jnp.zeros((2, 3)), size=draft)
    tree = Tree(tokens=draft, parent=draft, confidence=jnp.zeros((2, 3)), size=lengths)
    assert jax.tree.map(lambda leaf: leaf[0], tree).tokens.shape == (3,)
    assert jax.tree.map(lambda _: None, tree).size is None


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
    if importlib.util.find_spec(module).submodule_search_locations:
        module += ".__main__"
    with mock.patch.dict(os.environ), pytest.raises(Parsed):
        importlib.import_module(module).main(arguments)
