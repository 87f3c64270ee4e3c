"""House rules of the code that ruff does not hold: imports, names, words, docstrings."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import graphlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

import failfast_jax
from failfast_jax import decoding, results
from failfast_jax.decoding.decode_state import Tree
from failfast_jax.decoding.picking import agreeing_prefix
from failfast_jax.runtime.session import Progress
from failfast_jax.serving.queue import Queue

ROOT = Path(__file__).parents[1]
PACKAGES = ("failfast_jax", "convert", "tpu_scripts")
MOST_BEHIND = 10
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
    {"__init__", "answer_trace"},
    {"serving", "request_flags"},
    {"doctor", "generate", "serve", "chat", "harness", "bench", "train", "convert"},
    {"tpu_scripts"},
)
"""From the bottom up. A module imports from its own part and from lower layers; the bottom is one part."""


def files(*folders: str) -> list[Path]:
    actual = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert actual
    return actual


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
    graphlib.TopologicalSorter(graph).prepare()  # else its error names a circle


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


FORBIDDEN = re.compile(r"\s*(?:from|import) (?:\S+\.)?(?:test_|.*[. ]_(?!_|version|src)\w)")


def test_neither_test_files_nor_private_names_are_imported():
    """JAX 0.10 has no public name for the simulator of GPU kernels."""
    wrong = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in files(*PACKAGES, "tests")
        for line in path.read_text(encoding="utf-8").splitlines()
        if FORBIDDEN.match(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_annotations_are_checked():
    """The import hook of `conftest` is active: for functions and for dataclasses."""
    draft = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(jaxtyping.TypeCheckError, match="draft_length"):
        agreeing_prefix(draft, draft, jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(jaxtyping.TypeCheckError, match="size"):
        Tree(tokens=draft, parent=draft, confidence=jnp.zeros((2, 3)), size=draft)


# Docstrings; ruff holds that modules, classes and functions have one.


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [part for part in node.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]


def test_every_public_method_has_a_docstring():
    """Its own, or that of its base or protocol: a method of its name."""
    methods = [
        (path, method)
        for path in files("failfast_jax")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in methods_of(node)
    ]
    described = {method.name for _, method in methods if ast.get_docstring(method)}
    missing = [where(path, method) for path, method in methods if method.name not in described]
    assert len(described) > 100 and not missing, "\n".join(missing)


def parameters(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Names of a function's parameters; of a class those of its `__init__`, or its fields."""
    if isinstance(node, ast.ClassDef):
        inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not inits:
            return {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
        [node] = inits
    return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}


def described_arguments(docstring: str) -> list[str]:
    """The names before the colons of the section `Args:`."""
    section = re.search(r"^Args:\n((?: +.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return []
    indent = re.match(" *", section[1])[0]
    return [line.split(":")[0].strip(" *") for line in re.findall(rf"^{indent}(\S.*)", section[1], re.MULTILINE)]


def test_docstrings_describe_parameters_that_exist():
    """One by one, by name: two in one entry are a parameter that does not exist."""
    wrong, count = [], 0
    for path in files("failfast_jax", "convert"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names = described_arguments(ast.get_docstring(node) or "")
                count += len(names)
                wrong += [f"{where(path, node)}: {name!r}" for name in names if name not in parameters(node)]
    assert count > 300
    assert not wrong, "\n".join(wrong)


def undescribed(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Parameters and fields that neither the docstring, a string after the field nor its `option` describes."""
    described = set(re.findall(r"\w+", ast.get_docstring(node) or ""))
    for field, following in itertools.pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and (
            ast.unparse(following).startswith(("'", '"')) or "option(" in ast.unparse(field)
        ):
            described.add(field.target.id)
    everywhere = {"self", "cls", "batch", "target", "drafter", "state", "memory"}
    return [f"{node.name}: {name}" for name in sorted(parameters(node) - described - everywhere)]


def test_exported_names_describe_their_parameters():
    """In `failfast_jax` and `failfast_jax.decoding`, with their documented methods, and with the results of calls."""
    exported = [getattr(failfast_jax, name) for name in failfast_jax.__all__] + [*vars(decoding).values()]
    exported = [each for each in exported if str(getattr(each, "__module__", "")).startswith("failfast_jax.")]
    assert len(exported) > 25
    wrong = []
    for each in [*exported, results.Stats, results.Round, Progress, Queue]:
        [node] = ast.parse(inspect.getsource(each)).body
        methods = methods_of(node) if isinstance(node, ast.ClassDef) else []
        documented = [node, *(method for method in methods if ast.get_docstring(method))]
        wrong += [line for part in documented for line in undescribed(part)]
    assert not wrong, "\n".join(wrong)
