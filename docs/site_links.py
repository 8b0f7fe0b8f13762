"""A hook of mkdocs: links of the pages to files outside docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = Path(__file__).resolve().parent
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with absolute links; raises FileNotFoundError for one whose file is not
    there.
    """
    return with_repository_links(markdown, PurePosixPath(page.file.src_uri).parent)


def with_repository_links(markdown: str, folder: PurePosixPath) -> str:
    """Returns the text of a page that lies in `folder` of docs/ with absolute links to what lies
    outside docs/.
    """

    def absolute(found: re.Match[str]) -> str:
        target = (DOCS / folder / found[2]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        if not target.exists():
            raise FileNotFoundError(f"docs/{folder}: {found[2]} leads nowhere")
        return f"{found[1]}{repository()}/blob/main/{target.relative_to(DOCS.parent).as_posix()}"

    return _LINK.sub(absolute, markdown)


def repository() -> str:
    """Returns the address of the repository, from pyproject.toml."""
    found = re.search(
        r'^Repository = "(.*)"$', (DOCS.parent / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert found
    return found[1]
