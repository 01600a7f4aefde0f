"""The pages of a node and of a seed, each one file.

Its policy has a browser run exactly its own script and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from noloco_node.telemetry.web import Page

HTML = "text/html; charset=utf-8"


def node_page() -> Page:
    """What a browser shows; the rest it asks the node for (`/api/state`)."""
    return _page("page.html")


def swarm_page() -> Page:
    """What a seed shows of the whole swarm; the rest a browser asks it for."""
    return _page("swarm_page.html")


def _page(name: str) -> Page:
    html = _text(name)
    for shared in _SHARED:
        html = html.replace(f"/*{{{shared}}}*/\n", _text(shared))
    return Page(html.encode(), HTML, policy=policy_of(html))


def _text(name: str) -> str:
    return files("noloco_node.telemetry").joinpath(name).read_text(encoding="utf-8")


def policy_of(html: str) -> str:
    """The Content-Security-Policy of a page with scripts and styles of its own, by their hashes."""
    kinds = {kind: " ".join(map(_hashed, re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL))) for kind in _OWN}
    return (
        f"default-src 'none'; script-src {kinds['script']}; style-src {kinds['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_OWN = ("script", "style")
_SHARED = ("page.css", "page.js")
"""Both pages contain these files, where they name them in a comment in braces."""


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
