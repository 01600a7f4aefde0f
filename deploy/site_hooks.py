"""Hooks of `make site`: a page loads nothing from elsewhere."""

from __future__ import annotations

from typing import Any

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What mkdocs-material's offline plugin has a page load, for the search in a page that is opened as a file."""
COUNTS = ' data-md-component="source"'
"""The theme asks GitHub for a repository's stars and forks where a link to it is marked so."""


def on_post_page(output: str, page: Any, **_: object) -> str:
    """The page with our own stand-in from docs/assets, wherever in the site the page is. It asks for no counts."""
    own = output.replace(SHIM, "../" * page.url.count("/") + "assets/frame-worker.js")
    return own.replace(COUNTS, "")
