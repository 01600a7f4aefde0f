"""The pages of docs/: links lead somewhere, commands are real ones, the site shows all, a quick start is quick."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from deploy.reference import pages
from deploy.site_hooks import COUNTS, SHIM, on_post_page
from noloco_node.cli.commands import parser
from noloco_node.errors import ExitCode

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SHOWN = [path for path in sorted(DOCS.rglob("*.md")) if "results" not in path.parts]
DOCUMENTS = [ROOT / "README.md", *SHOWN]
MADE = pages()
TROUBLE = DOCS / "troubleshooting.md"
WORDS_A_MINUTE = 200
"""The words that a careful reader of technical text reads in a minute."""

_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_COMMAND = re.compile(r"^(?: {4}|\s*`?)(?:env/bin/)?(?:[A-Z_]+=\S+ )?(noloco-node [^`\n]+)", re.MULTILINE)
PLACES = {"ADDRESS": "/ip4/203.0.113.5/tcp/31337/p2p/12D3Koo", "RUN_FOLDER": "runs/node", "CONFIG": "tiny", "N": "1"}
"""What stands for a value that only the reader knows."""


def test_every_setting_says_what_it_means() -> None:
    """In its class, from where messages and `config show` have it, too."""
    rows = [line for line in MADE[DOCS / "settings.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("| – |")] == []


def anchors(document: Path) -> set[str]:
    """What a link into it may name."""
    headings = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in _HEADING.findall(prose(document)))
    return {re.sub(r"[-\s]+", "-", heading) for heading in headings}


def prose(document: Path) -> str:
    """Its text without fenced blocks, in which `#` begins a comment."""
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def dead_links(document: Path) -> Iterator[str]:
    """Targets that are not there, or that a page of the site names outside of the site."""
    for link in _LINK.findall(prose(document)):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        leaves_the_site = DOCS in document.parents and DOCS not in target.parents
        wrong_heading = anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
        if leaves_the_site or not target.exists() or wrong_heading:
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """To a file, and to a heading in it."""
    assert list(dead_links(document)) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    """A file that is not there, a heading that is not there, here and elsewhere."""
    (tmp_path / "other.md").write_text("# One heading\n")
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](other.md#one-heading) [b](other.md#none) [c](none.md) [d](#here) [e](#none)\n")
    assert list(dead_links(page)) == ["other.md#none", "none.md", "#none"]


def test_the_site_shows_every_page() -> None:
    """Each once."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shown = list(leaves(site["nav"]))
    assert sorted(shown) == sorted(path.relative_to(DOCS).as_posix() for path in SHOWN)


def leaves(node: object) -> Iterator[str]:
    """File names in a tree of lists and titles."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | dict):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from leaves(inner)


@pytest.mark.parametrize(("page", "minutes"), [("volunteer", 5), ("owner", 10), ("researcher", 5)])
def test_a_quick_start_is_quick_to_read(page: str, minutes: int) -> None:
    """Commands and tables included."""
    assert len((DOCS / f"{page}.md").read_text(encoding="utf-8").split()) <= minutes * WORDS_A_MINUTE


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of noloco-node in the documents that is meant to be typed."""
    for document in DOCUMENTS:
        for line in _COMMAND.findall(document.read_text(encoding="utf-8")):
            if "COMMAND" not in line:
                yield document.name, line.strip()


@pytest.mark.parametrize(("document", "line"), sorted(set(commands())))
def test_a_command_can_be_typed(document: str, line: str) -> None:
    """The program knows the command and each of its options."""
    text = line.partition(" > ")[0].partition("  #")[0]
    words = [PLACES.get(word, word) for word in shlex.split(text)]
    assert parser().parse_args(words[1:]).call


def test_every_exit_code_has_its_section() -> None:
    """In order, by number and name."""
    sections = re.findall(r"^## (\d+ .+)$", TROUBLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections == [f"{code.value} {code.name}" for code in ExitCode]


def test_one_address_of_the_repository_stands_everywhere() -> None:
    """That of mkdocs.yml: an address that is changed there alone is found here."""
    address = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["repo_url"]
    own = re.compile(r"https://github\.com/[\w.-]+/noloco[_-]node\b")
    places = [*DOCUMENTS, ROOT / "CITATION.cff", ROOT / "pyproject.toml"]
    named = {place.name: set(own.findall(place.read_text(encoding="utf-8"))) for place in places}
    assert {name: found for name, found in named.items() if found - {address}} == {}
    assert all(named[name] for name in ("README.md", "get.md", "CITATION.cff", "pyproject.toml"))


def test_the_site_is_searched_in_a_folder_and_contributors_pages_are_not_what_a_search_finds_first() -> None:
    """Opened as a file the site has its search; a word is found on a user's page before it is in a contributor's."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"search", "offline"} <= set(site["plugins"])
    (shown,) = (list(leaves(part)) for part in site["nav"] if "Contributor" in part)
    assert "contributing.md" in shown
    for page in shown:
        _, head, _ = (DOCS / page).read_text(encoding="utf-8").split("---\n", 2)
        assert yaml.safe_load(head)["search"]["boost"] < 1, page


def test_a_page_of_the_site_loads_its_search_from_beside_it() -> None:
    """The plugin's own address is elsewhere, and a folder that was opened as a file has no search without it. The theme
    had every reader's browser ask GitHub for the repository's stars."""
    page = SimpleNamespace(url="results/method/table.html")
    made = on_post_page(f'<a{COUNTS} href="x"></a><script src="{SHIM}"></script>', page, config=None)
    assert made == '<a href="x"></a><script src="../../assets/frame-worker.js"></script>'
    assert (DOCS / "assets/frame-worker.js").stat().st_size > 1000
    assert "deploy/site_hooks.py" in yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["hooks"]
