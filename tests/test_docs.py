"""Docstrings and pages: complete, and about code that exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import failfast_jax
from failfast_jax import decoding, results
from failfast_jax.drafters import all_options
from failfast_jax.runtime.session import Progress
from failfast_jax.serving.queue import Queue

ROOT = Path(__file__).parents[1]


class Public(NamedTuple):
    """A module, class, function or method that has no underscore in front, and the class that it stands in."""

    where: str
    name: str
    inside: ast.ClassDef | None
    node: ast.Module | ast.ClassDef | ast.FunctionDef


def publics() -> Iterator[Public]:
    """Everything public in `failfast_jax`; functions inside functions are not."""
    for path in sorted((ROOT / "failfast_jax").rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        yield Public(f"{path.relative_to(ROOT)}", path.stem, None, module)
        yield from members(path, module, None)


def members(path: Path, scope: ast.Module | ast.ClassDef, inside: ast.ClassDef | None) -> Iterator[Public]:
    for node in scope.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield Public(f"{path.relative_to(ROOT)}:{node.lineno}", node.name, inside, node)
            if isinstance(node, ast.ClassDef):
                yield from members(path, node, node)


def test_every_public_name_has_a_docstring():
    """A method needs none if one of its name has one: that of its base or protocol."""
    described = {public.name for public in publics() if public.inside and ast.get_docstring(public.node)}
    missing = [
        f"{public.where}: {public.name}"
        for public in publics()
        if not ast.get_docstring(public.node) and not (public.inside and public.name in described)
    ]
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
    for path in sorted(path for folder in ("failfast_jax", "convert") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names = described_arguments(ast.get_docstring(node) or "")
                count += len(names)
                unknown = [name for name in names if name not in parameters(node)]
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {name!r}" for name in unknown]
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
    """Those of `failfast_jax` and `failfast_jax.decoding`, their documented methods, and what they return."""
    exported = [getattr(module, name) for module in (failfast_jax, decoding) for name in module.__all__]
    exported = [each for each in exported if not isinstance(each, str)]
    exported += [results.Stats, results.Round, Progress, Queue]
    places = {(each.__module__.replace(".", "/"), each.__name__) for each in exported}
    everything = list(publics())
    nodes = [each.node for each in everything if (each.where.partition(".py")[0], each.name) in places]
    assert len(nodes) >= len(places) > 30
    methods = [each.node for each in everything if each.inside in nodes and ast.get_docstring(each.node)]
    wrong = [line for node in (*nodes, *methods) for line in undescribed(node)]
    assert not wrong, "\n".join(wrong)


def texts() -> list[str]:
    """Texts of the package, with a NUL for what is filled in."""
    nodes = [node for path in (ROOT / "failfast_jax").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    filled = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    return strings + [
        "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in parts) for parts in filled
    ]


def test_messages_that_are_explained_exist():
    """By the longest piece of each that is not filled in; JAX's and XLA's own are left out."""
    page, known = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8"), texts()
    messages = re.findall(r"^\| (?:doctor: )?`([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 15
    split = [re.split(r"\.\.\.|\b(?:[A-Zkmnv]|TPU)\b|, only", message) for message in messages]
    pieces = [max(parts, key=len).strip(" :,") for parts in split]
    assert [piece for piece in pieces if len(piece) < 9 or not any(piece in text for text in known)] == []


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


def test_the_site_has_every_page():
    """Every page of `docs/` stands in the menu of the site."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert pages and [page for page in pages if f": {page}\n" not in menu] == []


def test_the_tests_that_are_named_exist():
    pages = (".ci/versions", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "tests/fixtures/golden/README.md")
    for page in (*(ROOT / name for name in pages), *(ROOT / "docs").glob("*.md")):
        for path, name in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), f"{page.name}: {path}::{name}"


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tpu_scripts/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


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
    spec = importlib.util.spec_from_file_location("option_tables", ROOT / "docs" / "option_tables.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.on_page_markdown((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), page=None)
    assert hook.MARK not in page
    for method, options in all_options().items():
        section = page.partition(f"#### `{method}`")[2].partition("####")[0]
        rows = re.findall(r"^\| `(\w+)` \| (?:`.+`)? \| .*\w.* \|$", section, re.MULTILINE)
        assert rows == [field.name for field in dataclasses.fields(options)]
    assert "| `tau` | `0.45` | confidence below which a draft stops growing; from 0 to 1 |" in page
