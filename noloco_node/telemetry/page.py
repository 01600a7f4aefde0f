"""The page of a node and of a seed, one file.

Its policy has a browser run exactly its own script and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from noloco_node.telemetry.web import Page

HTML = "text/html; charset=utf-8"


def state_page() -> Page:
    """What a browser shows of a node, or of a swarm that a seed sees; it asks for the state (`/api/state`)."""
    html = text_of("page.html")
    for shared in ("page.css", "page.js"):
        html = html.replace(f"/*{{{shared}}}*/\n", text_of(shared))
    return Page(html.encode(), HTML, policy=policy_of(html))


def text_of(name: str) -> str:
    """One of the files that pages are made of."""
    return files("noloco_node.telemetry").joinpath(name).read_text(encoding="utf-8")


def policy_of(html: str) -> str:
    """The Content-Security-Policy of a page with scripts and styles of its own, by their hashes."""
    kinds = {kind: " ".join(map(_hashed, re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL))) for kind in _OWN}
    return (
        f"default-src 'none'; script-src {kinds['script']}; style-src {kinds['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_OWN = ("script", "style")


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
