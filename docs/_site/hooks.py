"""Hooks of the MkDocs build: the experiments' own pages become part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
#: The target of a Markdown link or image.
TARGET = re.compile(r"(\]\()([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add experiments/*/README.md and their figures; the repository keeps them beside the code that made them."""
    for path in sorted([*ROOT.glob("experiments/*/README.md"), *ROOT.glob("experiments/*/*.png")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links that are right in the repository, where docs/ and experiments/ are neighbours, into the site's."""
    here = posixpath.dirname(page.file.src_uri)
    in_repository = here if here.startswith("experiments/") else posixpath.join("docs", here)

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(in_repository, match[2]))
        for prefix in ("docs/", ""):
            source = target.removeprefix(prefix)
            if target.startswith(prefix) and files.get_file_from_path(source) is not None:
                return match[1] + posixpath.relpath(source, here or ".")
        return match[0]

    return TARGET.sub(rewrite, markdown)
