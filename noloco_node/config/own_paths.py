"""The places on this machine of the texts of a mixture: a path for each source, named as the run names it.

The path of a text source is no part of the run. A user that starts a node may say it beside the configuration, and one
that joins must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from noloco_node.config.data_spec import MixedSource
from noloco_node.errors import ExitCode, UserError

if TYPE_CHECKING:
    from noloco_node.config.run_spec import RunSpec

OWN_PATHS = "paths"
"""`run.data.paths`: a path of this machine by the name of the source, or by its number if it has none."""


def key_of(source: MixedSource, number: int) -> str:
    """What a source is called where its path is named."""
    return source.name or str(number)


def named_in_words(keys: Sequence[str]) -> str:
    """How paths for these sources are named on the command line."""
    return " ".join(f"--data-path {key}=PATH" for key in keys)


def join_line(run: RunSpec, address: str) -> str:
    """The command that joins a run by this address, as a shell takes it: with all that a volunteer has to name beside
    it, and where others are to reach the node, unless the address is of this machine only."""
    data = run.data
    texts = [key_of(each, number) for number, each in enumerate(data.mixture) if each.source == "text"]
    words = [named_in_words(texts)] if texts else ["--data-path PATH"] if data.source == "text" else []
    words += ["--set run.data.tokenizer=DIR"] if data.own_tokenizer else []
    invited = ["--invitation FILE"] if run.access.mode == "invited" else []
    return " ".join(["noloco-node join", address, *_listening(address), *invited, *words])


def _listening(address: str) -> list[str]:
    if address.startswith(("/ip4/127.", "/ip6/::1/")):
        return []
    return ["--host", "::" if address.startswith("/ip6/") else "0.0.0.0", "--port", "31337"]


def join_note(run: RunSpec) -> str:
    """What PATH and DIR of `join_line` stand for, and what a node does without them; empty where it has neither."""
    data = run.data
    has_text = any(part.source == "text" for part in data.parts)
    brings = (["text"] if has_text else []) + (["tokenizer"] if data.own_tokenizer else [])
    if not brings:
        return ""
    names = " and ".join({"text": "PATH", "tokenizer": "DIR"}[each] for each in brings)
    note = f"in place of {names}: the node's own copy of the run's {' and '.join(brings)}"
    return f"{note}. A node without one leaves that out, and serves a later stage" if run.stages > 1 else note


def numbered(keys: Sequence[tuple[str | None, bool]], paths: Mapping[str, str]) -> dict[int, str]:
    """The path of each source that has one, by its number. `keys`: the name of each source, and whether it is a text.

    Raises UserError (CONFIG) for a path of a source that the mixture does not have.
    """
    known = {name or str(number): number for number, (name, _) in enumerate(keys)}
    texts = [name or str(number) for number, (name, is_text) in enumerate(keys) if is_text]
    for key in paths:
        if key not in known:
            has = f"its texts are {', '.join(texts)}" if texts else "it has no text that is each volunteer's own"
            raise UserError(
                ExitCode.CONFIG,
                f"a path is named for '{key}', which is no source of run.data.mixture: {has}",
                f"name the sources as the run does: {named_in_words(texts)}" if texts else "leave the path out",
            )
    return {known[key]: path for key, path in paths.items()}


def with_own_paths(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it was written, with `run.data.paths` put into the sources of its mixture. Raises UserError
    (CONFIG) if they are no names and paths, or not of a text source of a mixture. Other mistakes in the mixture are
    left for its validation."""
    run = raw.get("run")
    data = cast("dict[str, Any]", run).get("data") if isinstance(run, dict) else None
    if not isinstance(data, dict) or OWN_PATHS not in data:
        return dict(raw)
    settled = dict(cast("dict[str, Any]", data))
    paths = _checked(settled.pop(OWN_PATHS))
    listed: object = settled.get("mixture")
    sources = cast("list[object]", listed) if isinstance(listed, list) else []
    if not sources and paths:
        raise UserError(
            ExitCode.CONFIG,
            f"a path is named for '{next(iter(paths))}', but run.data.mixture is not set: the run has one text",
            "name its place alone: --data-path PATH",
        )
    given = numbered([_key(source) for source in sources], paths)
    settled["mixture"] = [_placed(source, number, given.get(number)) for number, source in enumerate(sources)]
    return {**raw, "run": {**cast("dict[str, Any]", run), "data": settled}}


def _checked(value: object) -> dict[str, str]:
    paths = cast("dict[object, object]", value) if isinstance(value, dict) else None
    if paths is None or not all(isinstance(path, str) for path in paths.values()):
        raise UserError(
            ExitCode.CONFIG,
            "run.data.paths is no list of names and paths",
            "name a place for each source: --data-path NAME=PATH",
        )
    return {str(key): str(path) for key, path in paths.items()}


def _key(source: object) -> tuple[str | None, bool]:
    settings = cast("dict[str, object]", source) if isinstance(source, dict) else {}
    name = settings.get("name")
    return (name if isinstance(name, str) else None), settings.get("source") == "text"


def _placed(source: object, number: int, path: str | None) -> object:
    if path is None:
        return source
    name, is_text = _key(source)
    if not is_text:
        raise not_own(name or str(number))
    return {**cast("dict[str, object]", source), "path": path}


def not_own(key: str) -> UserError:
    """The error for a path of a source that is the same for all."""
    return UserError(
        ExitCode.CONFIG,
        f"a path is named for '{key}', a source that is the same on every machine",
        "name paths of sources whose `source` is text only",
    )
