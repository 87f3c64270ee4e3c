"""A hook of MkDocs: files that lie outside `docs/` become part of the site, and links to them point there."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "tpu_scripts/README.md": "cloud-tpu.md",
    "CHANGELOG.md": "changes.md",
    "examples/failfast.ipynb": "failfast.ipynb",
    "failfast_jax/bench/presets/failfast-paper.yaml": "failfast-paper.yaml",
}
"""Files of the repository, and what they are called in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of `OUTSIDE`."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as a reader of the repository needs them, `](../CHANGELOG.md)`, become links within the site."""
    for path, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{path}", f"]({name}")
    if page.file.src_uri in OUTSIDE.values():
        markdown = re.sub(r"\]\((?:\.\./)*docs/", "](", markdown)
    return markdown
