"""How a stranger learns which run it joins: a peer hands out what the run id is the hash of, and is held to it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from pydantic import ValidationError
from pydantic_core import from_json

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.bootstrap.hello import Hello, ask_hello, other_protocol, said_to_be_over
from noloco_node.config.data_spec import BYTES, FOLDER, NO_TOKENIZER, NOT_PREPARED, NOT_READ, MixedSource
from noloco_node.config.load import OwnData
from noloco_node.config.own_paths import key_of, named_in_words, not_own, numbered
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.tokenizer_files import check_tokenizer
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import log_passed_over, parse_address, peers_unreachable, shown
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.calls import NOTHING, BadAnswer, Method, Nothing, Reply, ask, judging, on
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import first_problem

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 128 * 1024
"""The largest RunSpec that travels, in bytes; an ordinary one has 2 KiB."""
SPEC = Method("hello.spec", Nothing, Nothing, at_once=2, text_bytes=MAX_SPEC_BYTES)


def serve_spec(transport: Transport, spec: RunSpec) -> None:
    """Hand out the RunSpec to any peer that asks, from now on: `RunSpec.agreed_json` as a tensor u8 [bytes]."""
    text = spec.agreed_json.encode()

    async def handle(_peer: PeerId, _request: Nothing) -> Reply[Nothing]:
        if len(text) > MAX_SPEC_BYTES:
            raise Refused(Refusal.TOO_LARGE, f"the RunSpec has {len(text)} bytes: join with its file")
        return Reply(NOTHING, (torch.frombuffer(bytearray(text), dtype=torch.uint8),))

    on(transport, SPEC, handle)


async def fetch_run_spec(
    transport: Transport,
    joined: Sequence[str],
    own: OwnData,
    *,
    reads_text: bool,
    met_in: str | None = None,
    brings_state: bool = True,
) -> RunSpec:
    """The RunSpec of the run that the peers at these addresses serve, from the first that gives a sound one.

    If they serve several it is that of the run `met_in`, in which this node was before, else the run of most of them.
    `own` is what the volunteer says of the run's text, which is read here if `reads_text`. `brings_state` says that the
    node has been in a run.

    Raises UserError: PEERS_UNREACHABLE if no peer answers. It raises NO_STATE_SOURCE if most of the peers say that the
    run has come to its end, and this node brings nothing to go on from. It raises WRONG_RUN if they serve several runs
    and none of these is most, or speak another protocol version. It does so too if they give no RunSpec that stands up
    to its hash. It raises CONFIG as `with_own_data` does.
    """
    hellos = _of_one_run(await _hellos(transport, joined), met_in)
    failures: dict[str, str] = {}
    for address, hello in hellos.items():
        try:
            spec = await _fetch(transport, parse_address(address).peer, hello)
        except (Refused, TransportError) as error:
            failures[address] = _reason(error, hello)
        else:
            log_passed_over(failures)
            if not brings_state and said_to_be_over(hello.over for hello in hellos.values()):
                raise run_has_ended(spec, "so say most of the peers that were named")
            return with_own_data(spec, own, reads_text=reads_text)
    lines = "".join(f"\n  {address}: {shown(why)}" for address, why in failures.items())
    raise UserError(
        ExitCode.WRONG_RUN,
        f"none of {len(failures)} peers gave a RunSpec that can be used{lines}",
        "name another node of the run, or install the version of noloco-node that its nodes have",
    )


def read_agreed(text: bytes) -> RunSpec:
    """Parse what a peer hands out. It may name files, but none of them is read.

    The path of a `text` source and that of a tokenizer's folder are `NOT_READ`, and weights to start from have none.
    Raises ValueError (ValidationError included) for what is no RunSpec: other JSON, unknown settings, values out of
    bounds, an inadmissible γ. It does so too for text that a terminal should not be shown.
    """
    parsed: object = from_json(text, allow_inf_nan=False)
    if not isinstance(parsed, dict):
        raise ValueError("it is no JSON object")
    raw = cast("dict[str, Any]", parsed)
    if not all(word.isprintable() for word in _words(raw)):
        raise ValueError("it holds control characters")
    data, model = raw.get("data"), raw.get("model")
    if isinstance(model, dict):
        cast("dict[str, Any]", model).pop("from_pretrained", None)
    if isinstance(data, dict):
        told = cast("dict[str, Any]", data)
        told.pop("prepared", None)
        if str(told.get("tokenizer_fingerprint")).startswith(FOLDER):
            told["tokenizer"] = NOT_READ
        mixed: object = told.get("mixture")
        several = cast("list[object]", mixed) if isinstance(mixed, list) else []
        for source in (told, *(cast("dict[str, Any]", each) for each in several if isinstance(each, dict))):
            if source.get("source") == "text":
                source["path"] = NOT_READ
    return RunSpec.model_validate(raw)


def with_own_data(spec: RunSpec, own: OwnData, *, reads_text: bool) -> RunSpec:
    """The RunSpec with what this volunteer has by itself: the places of the text and the tokenizer. Its run id stays.

    Raises UserError: CONFIG if such a place is missing, or if `own` contradicts the run. It raises it too if the run
    names files of this machine without the volunteer's word. A stranger must not choose what is read here. It raises
    DATA as `with_own_tokenizer` does.
    """
    if own.prepared is not None and spec.data.streaming:
        raise UserError(
            ExitCode.CONFIG,
            f"run.data.prepared is '{own.prepared}', but run '{spec.name}' streams its text, and {NOT_PREPARED}",
            "leave it out, and say where the text lies",
        )
    mixture = _with_own_sources(spec, own, reads_text=reads_text)
    data = spec.data.model_copy(update={"prepared": own.prepared, "mixture": mixture})
    if data.source == "text":
        if own.path is None and own.prepared is None and reads_text:
            raise TextNotNamed(
                spec,
                f"run.data.path is not set, and run '{spec.name}' trains on a text of which each volunteer has its own "
                "copy",
                "the text",
                "--data-path PATH",
            )
        data = data.model_copy(update={"path": own.path or data.path})
    check_own_word(spec, "path", data.path, own.path, reads=reads_text)
    return with_own_tokenizer(spec.model_copy(update={"data": data}), own.tokenizer, reads=reads_text)


def with_own_tokenizer(spec: RunSpec, named: str | None, *, reads: bool = True) -> RunSpec:
    """The run with the place where this volunteer keeps its tokenizer, in the folder `named`. Its run id stays. Raises
    UserError: CONFIG if the place is missing and it is read here, and as `check_own_word` for a tokenizer that is no
    folder. It raises DATA if the folder holds none, or another."""
    if not spec.data.own_tokenizer:
        check_own_word(spec, "tokenizer", spec.data.tokenizer, named, reads=reads)
        return spec
    if named is None:
        if reads and spec.data.tokenizer == NOT_READ:
            raise TextNotNamed(
                spec,
                f"run.data.tokenizer is not set, and run '{spec.name}' has a tokenizer "
                f"({spec.data.tokenizer_fingerprint}) of which each volunteer has its own copy",
                "its folder",
                "--set run.data.tokenizer=DIR",
            )
        return spec
    data = spec.data.model_copy(update={"tokenizer": named})
    check_tokenizer(data)
    return spec.model_copy(update={"data": data})


def _with_own_sources(spec: RunSpec, own: OwnData, *, reads_text: bool) -> tuple[MixedSource, ...]:
    """The sources of a mixture, each text with its place here; none if the run has one text. Raises UserError (CONFIG)
    if `own` names a place of what is no text of the run's. It raises it too if a text is read here without a named
    place, or in a place that only the run names. If all are prepared, it does not."""
    if not spec.data.mixture:
        if own.paths:
            raise _not_several(spec, next(iter(own.paths)))
        return ()
    if own.path is not None:
        raise _not_one(spec)
    sources = spec.data.mixture
    given = numbered([(source.name, source.source == "text") for source in sources], own.paths)
    for number, path in given.items():
        if sources[number].source != "text" and path != sources[number].path:
            raise not_own(key_of(sources[number], number))
    if reads_text and own.prepared is None:
        _check_named(spec, [number for number in range(len(sources)) if number not in given])
    return tuple(
        source.model_copy(update={"path": given[number]}) if number in given else source
        for number, source in enumerate(sources)
    )


def _check_named(spec: RunSpec, unnamed: Sequence[int]) -> None:
    """Raise UserError (CONFIG) for the sources with these numbers that are read from this machine."""
    sources = spec.data.mixture
    texts = [number for number in unnamed if sources[number].source == "text"]
    of_here = [number for number in unnamed if number not in texts and _is_local(sources[number].path or BYTES)]
    if not texts and not of_here:
        return
    numbers = texts or of_here
    named = ", ".join(f"run.data.mixture[{number}]{_in_brackets(sources[number].name)}" for number in numbers)
    words = shown(named_in_words([key_of(sources[number], number) for number in numbers]))
    if texts:
        what = f"no path is named for {named} of run '{spec.name}', a text of which each volunteer has its own copy"
        raise TextNotNamed(spec, what, "the text", words)
    raise UserError(
        ExitCode.CONFIG,
        f"{named} of run '{spec.name}' is {_quoted(sources[numbers[0]].path)}, which lies on this machine: a run that "
        "comes from a stranger may not choose which of your files are read",
        f"if it may read that, say so with {words}, that name as PATH; else do not join this run",
    )


def _in_brackets(name: str | None) -> str:
    return f" ({shown(name)})" if name else ""


def _not_several(spec: RunSpec, key: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"a path is named for '{key}', but run '{spec.name}' has one text",
        "name its place alone: --data-path PATH",
    )


def _not_one(spec: RunSpec) -> UserError:
    texts = [key_of(each, number) for number, each in enumerate(spec.data.mixture) if each.source == "text"]
    return UserError(
        ExitCode.CONFIG,
        f"one path is named, but run '{spec.name}' mixes {len(spec.data.mixture)} sources, {len(texts)} of them texts "
        "of each volunteer's own",
        f"name each one's: {shown(named_in_words(texts))}" if texts else "leave it out",
    )


def check_own_word(spec: RunSpec, name: str, value: str | None, named: str | None, *, reads: bool = True) -> None:
    """Raise UserError (CONFIG) if the run's `data.NAME` is this `value` and the volunteer has `named` another. It is
    raised too if it is a file of this machine, which is read here, without the volunteer's word."""
    if named is not None and named != value:
        raise UserError(
            ExitCode.CONFIG,
            f"run.data.{name} is '{named}', but for run '{spec.name}' it is {_quoted(value)}",
            f"leave out --set run.data.{name}: a joiner takes the run as it is",
        )
    if reads and named is None and value is not None and _is_local(value):
        raise _local(spec, name, value)


def _words(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield key
            yield from _words(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _words(inner)


class TextNotNamed(UserError):
    """A text or tokenizer of which each volunteer has a copy is read here, and nobody said where it lies (CONFIG)."""

    def __init__(self, spec: RunSpec, what: str, get: str, how: str) -> None:
        super().__init__(ExitCode.CONFIG, what, f"get {get} from the run's owner, and say where it lies with {how}")
        self.stages = spec.stages


def _local(spec: RunSpec, name: str, value: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"run.data.{name} of run '{spec.name}' is {_quoted(value)}, which lies on this machine: a run that comes from "
        "a stranger may not choose which of your files are read",
        f"if it may read that, say so with --set run.data.{name}={_quoted(value)}; else do not join this run",
    )


def _is_local(name: str) -> bool:
    """Whether the loaders of datasets and tokenizers might take the name for a file or folder of this machine."""
    if name in (BYTES, NO_TOKENIZER, NOT_READ):
        return False
    return name.startswith(("/", ".", "~")) or any(os.path.exists(part) for part in (name, name.partition(":")[0]))


def _of_one_run(hellos: dict[str, Hello], met_in: str | None) -> dict[str, Hello]:
    """The hellos of the one run to join; the others are logged. A single key that names another run must not keep a
    volunteer out. Neither may one process that answered for most of the peers that this node has written down."""
    runs = Counter(hello.run for hello in hellos.values())
    chosen, votes = (met_in, len(hellos)) if met_in in runs else runs.most_common(1)[0]
    if 2 * votes <= len(hellos):
        lines = "".join(f"\n  {address}: run '{h.name}' ({h.run})" for address, h in hellos.items())
        raise UserError(
            ExitCode.WRONG_RUN,
            f"the addresses belong to {len(runs)} runs:{lines}",
            "choose one of the runs, and name addresses of its nodes only",
        )
    log_passed_over({a: f"it serves run '{h.name}' ({h.run})" for a, h in hellos.items() if h.run != chosen})
    return {address: hello for address, hello in hellos.items() if hello.run == chosen}


async def _hellos(transport: Transport, joined: Sequence[str]) -> dict[str, Hello]:
    """The peers that answer in this protocol version, by address; the others are logged with the reason."""
    asked = await asyncio.gather(*(_hello_or_reason(transport, address) for address in joined))
    answers = dict(zip(joined, asked, strict=True))
    silent = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
    hellos = {address: answer for address, answer in answers.items() if isinstance(answer, Hello)}
    if not hellos:
        raise peers_unreachable(silent)
    ours = {address: hello for address, hello in hellos.items() if hello.protocol == PROTOCOL_VERSION}
    if not ours:
        raise other_protocol(next(iter(hellos.values())))
    others = {a: f"it speaks protocol version {h.protocol}" for a, h in hellos.items() if a not in ours}
    log_passed_over(silent | others)
    return ours


async def _hello_or_reason(transport: Transport, address: str) -> Hello | str:
    try:
        hello = await ask_hello(transport, parse_address(address).peer)
        return hello if hello.run else "it is a seed that knows of no run: name a node of the run beside it"
    except (Refused, TransportError) as error:
        return f"it does not say which run it serves ({shown(str(error) or repr(error))})"


async def _fetch(transport: Transport, peer: PeerId, hello: Hello) -> RunSpec:
    """One peer's RunSpec, equal to the run that it said it serves. Raises Refused or TransportError."""
    answer = await ask(transport, peer, SPEC, NOTHING, seconds=20.0, progress=10.0)
    with judging(transport, peer, SPEC.name):
        return _spec_of(answer.tensors[0].numpy().tobytes(), hello)


def _spec_of(text: bytes, hello: Hello) -> RunSpec:
    """The RunSpec of the run that this hello names. Raises BadAnswer."""
    try:
        spec = read_agreed(text)
        found = spec.run_id
    except ValidationError as error:
        raise BadAnswer(f"its RunSpec is refused: {_unknown_setting(error) or first_problem(error)}") from None
    except ValueError as error:
        raise BadAnswer(f"its RunSpec is refused: {error}") from None
    if found != hello.run:
        raise BadAnswer(f"its RunSpec is that of run {found}, but it says that it serves {hello.run}")
    return spec


def _reason(error: Refused | TransportError, hello: Hello) -> str:
    if isinstance(error, Refused) and error.reason is Refusal.UNKNOWN_METHOD:
        return f"noloco-node {hello.version} does not hand out its RunSpec (this node has {__version__})"
    releases = "" if hello.version == __version__ else f" (noloco-node {hello.version} there, {__version__} here)"
    return (str(error) or repr(error)) + releases


def _unknown_setting(error: ValidationError) -> str | None:
    """The setting of a RunSpec that this release does not know, where that is its first mistake."""
    first = error.errors(include_url=False, include_input=False)[0]
    setting = shown(".".join(map(str, ("run", *first["loc"]))))
    return f"there is no setting {setting} here" if first["type"] == "extra_forbidden" else None


def _quoted(value: str | None) -> str:
    return "not set" if value is None else f"'{shown(value)}'"


class RunHasEnded(UserError):
    """For a node that comes when nobody trains any more (NO_STATE_SOURCE)."""


def run_has_ended(spec: RunSpec, why: str) -> RunHasEnded:
    """The error for a node that comes when nobody trains any more."""
    return RunHasEnded(
        ExitCode.NO_STATE_SOURCE,
        f"run {spec.run_id[:8]} ({spec.name}) has come to its end: {why}",
        "to train its model further start a new run from it, with another run.name, run folders and invitations "
        "(docs/operations.md, Going on after the end); to begin this one anew, start its first node and its seed in "
        "new folders, the first of them without initial peers",
    )
