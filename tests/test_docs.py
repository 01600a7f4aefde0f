"""What the documents name exists: files, folders, modules, classes, members, functions, settings, tests. Made pages
are what the code makes, and quoted messages are what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.reference import pages
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "noloco_node"
PAGES = pages()
MADE = {path.name for path in PAGES}
"""Pages made from the code name what is in it."""
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in MADE),
    *sorted((ROOT / "docs/decisions").glob("*.md")),
]

OF_THE_MODEL = "run.model.config."
"""Settings that transformers names."""
MADE_BY_A_RUN = frozenset({"nodes/", "model/", "table.md"})
"""Folders that a run leaves; they are not in the repository."""
SETTINGS_FILES = (
    "config/run_spec.py",
    "config/model_spec.py",
    "config/data_spec.py",
    "config/node_settings.py",
    "config/experiments.py",
    "config/load.py",
)

_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_PRIVATE = re.compile(r"_[A-Za-z]\w+")
_TEST = re.compile(r"test_\w+")
_CAMEL = re.compile(r"(?:[A-Z][a-z]+\w*){2,}")
_AT_THE_TOP = re.compile(r"^(?:(?:class|def|async def) )?([A-Za-z_]\w*)(?=[(:\[]| =)", re.MULTILINE)
_SOURCE = (".py", ".md", ".toml", ".yaml")

FOREIGN = frozenset(
    {"AutoModelForCausalLM", "LlamaForCausalLM", "BytesWithPublicKey", "RSASignatureValidator", "_UNIX_SOCKET_PREFIX"}
)
"""Names of other projects that look like ours."""


@dataclass
class Names:
    """Everything that has a name in the sources, read without importing any."""

    modules: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Last part of a module's dotted name -> the names at its top."""
    classes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Class -> its members, those of its bases included where they are ours."""
    everything: set[str] = field(default_factory=set[str])
    tests: set[str] = field(default_factory=set[str])
    texts: set[str] = field(default_factory=set[str])
    """String constants: names of methods on the wire, protocol words."""
    said: list[str] = field(default_factory=list[str])
    """Every text, `\\0` in the place of what it names."""
    settings: set[str] = field(default_factory=set[str])


def members_of(definition: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes that the class's own code gives it."""
    found: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])):
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute):
                    found.add(target.attr)
    return found


def top_of(tree: ast.Module) -> set[str]:
    """Names that a module defines at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def read_names() -> Names:
    """The names of the package and of the tests."""
    names = Names()
    bases: dict[str, list[str]] = {}
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        top = set(_AT_THE_TOP.findall(path.read_text(encoding="utf-8")))
        names.everything |= top
        names.tests |= {name for name in top if name.startswith("test_")}
    for path in PACKAGE.rglob("*.py"):
        top = top_of(tree_of(path))
        names.everything |= top
        names.modules.setdefault(path.stem if path.stem != "__init__" else path.parent.name, set()).update(top)
        names.modules.setdefault(path.parent.name, set()).add(path.stem)
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                members = members_of(node)
                names.classes.setdefault(node.name, set()).update(members)
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                names.everything |= members
                if path.relative_to(PACKAGE).as_posix() in SETTINGS_FILES:
                    names.settings |= members
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.texts.add(node.value)
                names.said.append(re.sub(r"%(?:\.\d+)?[sdgrf]", "\0", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                names.said.append("".join(map(str, parts)))
    for name, parents in bases.items():
        for parent in parents:
            names.classes[name] |= names.classes.get(parent, set())
    return names


NAMES = read_names()
SURFACE = frozenset((ROOT / "tests/public_surface.txt").read_text(encoding="utf-8").split())
"""Settings and fields of events, among other words."""


def spans(text: str, folder: str = "") -> Iterator[str]:
    """Inline code and targets of links, without fenced and indented blocks; links are relative to `folder`."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        if not line.startswith("    "):
            yield from _CODE.findall(line)
            yield from (folder + link for link in _LINK.findall(line))


def problem(span: str) -> str | None:
    """Why what `span` names does not exist; None where it does, or where it names nothing of this repository."""
    span = span.rstrip(",")
    if _PATH.fullmatch(span) and ("/" in span or span.endswith(_SOURCE)):
        return path_problem(span)
    call = re.fullmatch(r"([\w.]+)\(.*\)", span)
    name = call[1] if call else span
    if name.startswith(OF_THE_MODEL):
        return None
    if _DOTTED.fullmatch(name):
        return dotted_problem(name)
    if _TEST.fullmatch(name):
        return None if name in NAMES.tests else f"no test is called {name}"
    wanted = _PRIVATE.fullmatch(name) or _CAMEL.fullmatch(name) or call
    known = NAMES.everything | NAMES.classes.keys() | FOREIGN
    return f"nothing is called {name}" if wanted and name not in known else None


def path_problem(path: str) -> str | None:
    """A path must exist from the root, from the package, or in one of the package's rooms; `*` stands for anything."""
    if path in MADE_BY_A_RUN or path.startswith("runs/") or (path.endswith(".yaml") and "/" not in path):
        return None
    places = (ROOT, PACKAGE, *(folder for folder in PACKAGE.iterdir() if folder.is_dir()))
    return None if any(any(place.glob(path.rstrip("/"))) for place in places) else f"there is no {path}"


def dotted_problem(name: str) -> str | None:
    """`Class.member`, `module.name`, `group.setting` or a name on the wire; other projects' names are passed over."""
    parts = name.split(".")
    if name in NAMES.texts or name in SURFACE:
        return None
    if parts[0] == "noloco_node":
        parts = parts[1:]
    while len(parts) > 1:
        owner, member = parts[0], parts[1]
        known = NAMES.classes.get(owner)
        if known is None and owner in NAMES.modules:
            known = NAMES.modules[owner] | (NAMES.settings if owner in NAMES.settings else set())
        if known is None and owner in NAMES.settings:
            known = NAMES.settings
        if known is None:
            return None
        if member not in known:
            return f"{owner} has no {member}"
        parts = parts[1:]
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_whatever_a_document_names_exists(document: Path) -> None:
    """Every path, dotted name, call, private name, class and test in inline code."""
    folder = "" if document.parent == ROOT else f"{document.parent.relative_to(ROOT).as_posix()}/"
    found = list(spans(document.read_text(encoding="utf-8"), folder))
    assert found, "a document without one name proves nothing"
    assert [why for why in map(problem, found) if why] == []


@pytest.mark.parametrize(
    "span",
    [
        "pipeline/no_such_file.py",
        "docs/no-such.md",
        "no_such_room/",
        "tests/no_such/*",
        "Averaging.no_such_method",
        "matchmaking.no_such_function",
        "outer.no_such_setting",
        "noloco_node.pipeline.no_such_module",
        "no_such_call()",
        "_no_such_helper",
        "NoSuchClass",
        "test_no_such_test",
    ],
)
def test_what_does_not_exist_is_found(span: str) -> None:
    """Each kind of dead name is seen."""
    assert problem(span)


@pytest.mark.parametrize(
    "span",
    [
        "averaging/step.py",
        "step.py",
        "tests/outer/*",
        "outer/",
        "Averaging.taking_state",
        "NodeStopped.time",
        "outer.inner_steps",
        "run.inner.learning_rate",
        "outer.chunk",
        "noloco_node.averaging.step",
        "torch.func.functional_call",
        "choose_peer(...)",
        "busy",
    ],
)
def test_what_exists_or_is_not_ours_passes(span: str) -> None:
    """A member inherited, a path from a room, a name on the wire, another project's function."""
    assert problem(span) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_made_page_is_what_the_code_makes(page: Path) -> None:
    """To the letter."""
    assert page.read_text(encoding="utf-8") == PAGES[page], "run `make reference`"


MOST_RECORDS = 40
MOST_LINES = 15
DECISIONS = ROOT / "docs/decisions"


@dataclass(frozen=True)
class Decision:
    """One record of a page of decisions."""

    page: str
    number: int
    title: str
    lines: int
    """Without its title and empty ones."""


def decisions(pages_of_them: dict[str, str]) -> list[Decision]:
    """The records of pages by name, in the order in which they stand."""
    found: list[Decision] = []
    for page, text in pages_of_them.items():
        for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            title, _, body = part.partition("\n")
            number, _, words = title.partition(". ")
            lines = sum(bool(line.strip()) for line in body.splitlines())
            found.append(Decision(page, int(number), words, lines))
    return found


def problems_of_decisions(index: str, pages_of_them: dict[str, str]) -> list[str]:
    """Records that are too many, too long, or not in the index as they are called, in the order of their numbers."""
    records = sorted(decisions(pages_of_them), key=lambda record: record.number)
    named: list[tuple[str, str, str]] = []
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        page = re.search(r"\]\(([\w-]+)\.md\)", part)
        named += [(n, title, page[1] if page else "") for n, title in re.findall(r"^(\d+)\. (.+)$", part, re.MULTILINE)]
    known = [(str(record.number), record.title, record.page) for record in records]
    wrong = [f"{len(records)} records: join two of them"] if len(records) > MOST_RECORDS else []
    wrong += [f"record {r.number} has {r.lines} lines" for r in records if r.lines > MOST_LINES]
    if [record.number for record in records] != list(range(1, len(records) + 1)):
        wrong.append("the numbers have gaps")
    return wrong if known == named else [*wrong, f"the index differs in {set(known) ^ set(named)}, or in its order"]


def test_decisions_are_few_and_short_and_stand_in_their_index() -> None:
    """At most 40 records of at most 15 lines: what is more is history's, which the index names."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DECISIONS.glob("*.md"))}
    assert problems_of_decisions(texts.pop("index"), texts) == []


@pytest.mark.parametrize(
    ("index", "text", "wrong"),
    [
        ("", "## 1. One\n", 1),
        ("1. One\n2. Two\n", "## 1. One\n", 1),
        ("1. One\n", "## 1. One\n" + "- a line\n" * 16, 1),
        ("2. Two\n", "## 2. Two\n", 1),
        ("".join(f"{n}. A\n" for n in range(1, 42)), "".join(f"## {n}. A\n" for n in range(1, 42)), 1),
        ("1. One\n", "## 1. One\n" + "- a line\n" * 15, 0),
    ],
)
def test_a_page_of_decisions_that_breaks_a_rule_is_seen(index: str, text: str, wrong: int) -> None:
    """Missing in the index, only there, too long, with a gap, too many; and one that is in order."""
    assert len(problems_of_decisions(f"## [A page](page.md)\n\n{index}", {"page": text})) == wrong


def stands_in_the_code(message: str) -> bool:
    """Whether one text of the package reads so, `…` standing for whatever it names or goes on with."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in NAMES.said)


QUOTED = re.findall(
    r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_stands_in_the_code(message: str) -> None:
    """A user that searches for what the screen says finds the page, and the page never quotes what nothing says."""
    assert stands_in_the_code(message)


def test_what_nothing_says_is_seen() -> None:
    """That holds also if only a word of a message has changed."""
    assert len(QUOTED) > 40
    assert not stands_in_the_code("node.identity: … is in use of …")
