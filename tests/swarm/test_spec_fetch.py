"""A stranger is told which run it joins: only a RunSpec that is sound, bounded and what its hash says is believed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import base58
import pytest
import torch

from noloco_node import PROTOCOL_VERSION
from noloco_node.bootstrap import hello, spec_fetch
from noloco_node.bootstrap.hello import Hello, said_to_be_over, serve_hello
from noloco_node.bootstrap.spec_fetch import MAX_SPEC_BYTES, fetch_run_spec, read_agreed, serve_spec
from noloco_node.config.data_spec import NOT_READ
from noloco_node.config.load import OwnData, load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.config.settings import canonical_json
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.config.test_tokenizer_files import made, with_tokenizer
from tests.swarm.worlds import LIMITS
from tests.worlds import no_tensors

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
SPEC = load_config(MICRO).run
OTHER = load_config(MICRO, ["run.name=other"]).run
OWN_TEXT = load_config(MICRO, ["run.data.source=text", "run.data.path=/home/owner/secret.txt"]).run


def peer_id(number: int) -> PeerId:
    """A well-formed peer id."""
    return PeerId(base58.b58encode(b"\x00\x24" + bytes([number] * 36)).decode())


def spec_bytes(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The micro run as it travels, with something in it changed."""
    raw = json.loads(SPEC.agreed_json)
    change(raw)
    return json.dumps(raw).encode()


@dataclass
class Swarm:
    """A joiner and the peers whose addresses it was given."""

    network: MemoryNetwork
    joiner: MemoryTransport
    addresses: list[str] = field(default_factory=list[str])
    transports: list[MemoryTransport] = field(default_factory=list[MemoryTransport])

    def peer(self) -> MemoryTransport:
        """One more peer, which serves nothing yet; its address is given to the joiner."""
        transport = MemoryTransport(self.network, peer_id(len(self.addresses) + 1), LIMITS)
        self.transports.append(transport)
        self.addresses.append(f"/ip4/127.0.0.1/tcp/{len(self.addresses) + 1}/p2p/{transport.peer_id}")
        return transport

    def sound(self, spec: RunSpec = SPEC, *, over: bool = False) -> MemoryTransport:
        """One more peer of a run, which may remember that it is `over`."""
        transport = self.peer()
        serve_hello(transport, spec, lambda: 0, lambda: over)
        serve_spec(transport, spec)
        return transport

    def says(self, text: bytes, *, run: str = SPEC.run_id) -> MemoryTransport:
        """One more peer that claims a run and hands out this text."""
        transport = self.peer()
        claim(transport, Hello(run=run, name="micro", protocol=PROTOCOL_VERSION, version="9.9", stage=0))
        answer_with(transport, torch.tensor(list(text), dtype=torch.uint8))
        return transport

    async def fetch(self, own: OwnData | None = None, *, reads_text: bool = True, met_in: str | None = None) -> RunSpec:
        """What the joiner comes to."""
        own = own or OwnData()
        return await fetch_run_spec(self.joiner, self.addresses, own, reads_text=reads_text, met_in=met_in)

    async def refusal(self, own: OwnData | None = None) -> UserError:
        """The error that the joiner gets; it says what to do."""
        with pytest.raises(UserError) as caught:
            await self.fetch(own)
        assert caught.value.remedy
        assert str(caught.value).replace("\n", "").isprintable()
        return caught.value


def claim(transport: MemoryTransport, said: Hello) -> None:
    """Answer `hello` so."""
    header = said.model_dump(mode="json")

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return Message(header)

    transport.serve(hello.HELLO.name, no_tensors, handle, max_concurrent_per_peer=4)


def answer_with(transport: MemoryTransport, *tensors: torch.Tensor) -> None:
    """Answer `hello.spec` so."""

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return Message({}, tensors)

    transport.serve(spec_fetch.SPEC.name, no_tensors, handle, max_concurrent_per_peer=4)


@contextlib.asynccontextmanager
async def swarm() -> AsyncIterator[Swarm]:
    """A joiner alone on a network in memory."""
    network = MemoryNetwork()
    made = Swarm(network, MemoryTransport(network, peer_id(200), LIMITS))
    try:
        yield made
    finally:
        for transport in (made.joiner, *made.transports):
            await transport.close()


async def test_a_joiner_gets_the_run_that_its_peer_serves() -> None:
    """Equal to the last setting, from one address."""
    async with swarm() as made:
        made.sound()
        assert await made.fetch() == SPEC


async def test_who_comes_after_the_runs_end_is_told_before_it_waits() -> None:
    """It is told if most of the peers that it named remember it. A node that has been in a run may have something to go
    on from."""
    async with swarm() as made:
        made.sound(over=True)
        with pytest.raises(UserError, match="has come to its end: so say most of the peers that were named") as caught:
            await fetch_run_spec(made.joiner, made.addresses, OwnData(), reads_text=True, brings_state=False)
        assert caught.value.exit_code is ExitCode.NO_STATE_SOURCE
        assert "Going on after the end" in caught.value.remedy
        assert "target_tokens" not in caught.value.remedy, "its folder would refuse that run"
        assert await made.fetch() == SPEC
        made.sound()
        assert await fetch_run_spec(made.joiner, made.addresses, OwnData(), reads_text=True, brings_state=False) == SPEC


@pytest.mark.parametrize(
    ("votes", "over"),
    [("o", True), ("", False), ("og", False), ("oog", True), ("ou", True), ("u", False), ("oug", False)],
)
def test_the_words_of_those_that_cannot_know_of_the_runs_end_do_not_count(votes: str, over: bool) -> None:
    """`o`: it is over; `g`: it goes on; `u`: the peer does not know."""
    assert said_to_be_over(None if vote == "u" else vote == "o" for vote in votes) is over


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OTHER.agreed_json.encode(), "run " + OTHER.run_id),
        (spec_bytes(lambda raw: raw["outer"].update(gamma=2.5)), "outside the admissible set"),
        (spec_bytes(lambda raw: raw["inner"].update(target_tokens=-1)), "inner.target_tokens"),
        (spec_bytes(lambda raw: raw["inner"].update(speed=1)), "inner.speed"),
        (spec_bytes(lambda raw: raw["inner"].update(optimizer="lion")), "inner.optimizer"),
        (spec_bytes(lambda raw: raw["inner"].update(learning_rate=float("nan"))), "refused"),
        (spec_bytes(lambda raw: raw["model"]["config"].update(num_hidden_layers=10**9)), "num_hidden_layers"),
        (spec_bytes(lambda raw: raw["model"]["config"].update(rope_theta=float("inf"))), "refused"),
        (spec_bytes(lambda raw: raw["data"].update(text_field="\x1b[2J")), "control characters"),
        (spec_bytes(lambda raw: raw["model"]["config"].update({"\x1b[2J": 1})), "control characters"),
        (SPEC.agreed_json.encode()[:-1], "refused"),
        (b'{"outer": ' + b"[" * 5000, "refused"),
        (b"[1, 2]", "no JSON object"),
        (b"\xff\xfe", "refused"),
        (b"", "refused"),
    ],
    ids=[
        "other run", "gamma", "out of bounds", "unknown", "optimizer", "nan", "bomb", "infinite", "escape",
        "escaped key", "torn", "deep", "list", "no utf-8", "empty",
    ],
)  # fmt: skip
async def test_a_peer_whose_spec_is_not_the_one_it_claims_or_is_unsound_is_refused_for_the_next(
    text: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone it is an error that names address and reason; beside a sound peer it is one line, and the joiner joins."""
    async with swarm() as made:
        made.says(text)
        error = await made.refusal()
        assert error.exit_code is ExitCode.WRONG_RUN
        assert made.addresses[0] in error.message
        assert words in error.message
        made.sound()
        with caplog.at_level(logging.WARNING):
            assert await made.fetch() == SPEC
        lines = [line for line in caplog.messages if made.addresses[0] in line]
        assert len(lines) == 1
        assert words in lines[0]


async def test_an_inadmissible_gamma_is_refused_even_where_the_hash_is_right() -> None:
    """What a laboratory may look at never comes from the network."""
    outer = {**SPEC.outer.model_dump(), "gamma": 2.5}
    raw = {**SPEC.model_dump(), "outer": outer}
    unstable = RunSpec.model_validate(raw, context={"allow_inadmissible": True})
    async with swarm() as made:
        made.sound(unstable)
        assert "admissible" in (await made.refusal()).message


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.tensor(list(SPEC.agreed_json.encode().ljust(MAX_SPEC_BYTES + 1)), dtype=torch.uint8),),
        (),
        (torch.zeros(2, 2, dtype=torch.uint8),),
        (torch.zeros(8),),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
    ],
    ids=["oversized", "nothing", "matrix", "floats", "two"],
)
async def test_an_answer_of_the_wrong_size_or_kind_is_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    """Before anything of it is parsed."""
    async with swarm() as made:
        transport = made.peer()
        serve_hello(transport, SPEC, lambda: 0)
        answer_with(transport, *tensors)
        assert (await made.refusal()).exit_code is ExitCode.WRONG_RUN


async def test_a_spec_too_large_to_travel_is_said_to_be_so() -> None:
    """Its owner's node says what to do instead."""
    config = {**SPEC.model.config, "architectures": ["A" * MAX_SPEC_BYTES]}
    large = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"config": config})})
    async with swarm() as made:
        made.sound(large)
        assert "join with its file" in (await made.refusal()).message


async def test_a_peer_that_knows_no_such_method_is_passed_over_with_its_version() -> None:
    """An older node serves a run, but does not hand it out."""
    async with swarm() as made:
        old = made.peer()
        claim(old, Hello(run=SPEC.run_id, name="micro", protocol=PROTOCOL_VERSION, version="0.0.9", stage=0))
        error = await made.refusal()
        assert "noloco-node 0.0.9 does not hand out its RunSpec" in error.message
        made.sound()
        assert await made.fetch() == SPEC


async def test_addresses_of_several_runs_stop_the_joiner_with_names_and_ids_by_address() -> None:
    """It must not choose for the person."""
    async with swarm() as made:
        made.sound()
        made.sound(OTHER)
        error = await made.refusal()
        assert error.exit_code is ExitCode.WRONG_RUN
        for address, spec in zip(made.addresses, (SPEC, OTHER), strict=True):
            assert f"{address}: run '{spec.name}' ({spec.run_id})" in error.message


async def test_a_few_addresses_of_another_run_stop_no_joiner(caplog: pytest.LogCaptureFixture) -> None:
    """The run of most of the addresses is taken, and the peer that names another one is reported."""
    async with swarm() as made:
        made.sound(OTHER)
        made.sound()
        made.sound()
        with caplog.at_level(logging.WARNING):
            assert await made.fetch() == SPEC
        lines = [line for line in caplog.messages if made.addresses[0] in line]
        assert len(lines) == 1
        assert OTHER.run_id in lines[0]


async def test_where_peers_were_met_in_a_run_one_of_it_is_enough() -> None:
    """One process may have answered under most of the keys that a node wrote down."""
    async with swarm() as made:
        for _ in range(5):
            made.sound(OTHER)
        made.sound()
        assert await made.fetch(met_in=SPEC.run_id) == SPEC
        assert await made.fetch() == OTHER
        assert await made.fetch(met_in="0" * 32) == OTHER


@pytest.mark.parametrize("kind", [FaultKind.UNREACHABLE, FaultKind.LOSE_ANSWER])
async def test_a_peer_that_falls_silent_is_passed_over_and_all_silent_is_unreachable(
    kind: FaultKind, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first word."""
    async with swarm() as made:
        first = made.sound()
        made.network.inject(Fault(kind, target=first.peer_id))
        error = await made.refusal()
        assert error.exit_code is ExitCode.PEERS_UNREACHABLE
        assert made.addresses[0] in error.message
        made.sound()
        with caplog.at_level(logging.WARNING):
            assert await made.fetch() == SPEC
        assert made.addresses[0] in caplog.text
        assert made.network.fired[kind] == 2


async def test_a_peer_that_dies_between_hello_and_spec_is_passed_over() -> None:
    """The next one gives the same run."""
    async with swarm() as made:
        first = made.sound()
        made.sound()
        made.network.inject(Fault(FaultKind.LOSE_ANSWER, target=first.peer_id, method=spec_fetch.SPEC.name))
        assert await made.fetch() == SPEC
        assert made.network.fired[FaultKind.LOSE_ANSWER] == 1


async def test_another_protocol_version_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Alone it is an error, beside a peer of our own it is passed over."""
    async with swarm() as made:
        claim(made.peer(), Hello(run=OTHER.run_id, name="x", protocol=PROTOCOL_VERSION + 1, version="9.9", stage=0))
        error = await made.refusal()
        assert error.exit_code is ExitCode.WRONG_RUN
        assert f"protocol version {PROTOCOL_VERSION + 1} (noloco-node 9.9)" in error.message
        made.sound()
        with caplog.at_level(logging.WARNING):
            assert await made.fetch() == SPEC
        assert f"it speaks protocol version {PROTOCOL_VERSION + 1}" in caplog.text


async def test_a_hello_with_control_characters_is_none() -> None:
    """Names of strangers reach the terminal."""
    async with swarm() as made:
        transport = made.peer()

        async def handle(_peer: PeerId, _message: Message) -> Message:
            return Message({"run": SPEC.run_id, "name": "\x1b[2J", "protocol": 1, "version": "1", "stage": 0})

        transport.serve(hello.HELLO.name, no_tensors, handle, max_concurrent_per_peer=4)
        assert (await made.refusal()).exit_code is ExitCode.PEERS_UNREACHABLE


async def test_where_a_volunteer_keeps_its_text_is_not_told_and_must_be_said_by_who_reads_it(tmp_path: Path) -> None:
    """The owner's path does not travel; the joiner's own is taken; a later stage reads no text."""
    assert "secret" not in OWN_TEXT.agreed_json
    async with swarm() as made:
        made.sound(OWN_TEXT)
        error = await made.refusal()
        assert error.exit_code is ExitCode.CONFIG
        assert "run.data.path is not set" in error.message
        assert "--data-path PATH" in error.remedy
        mine = await made.fetch(OwnData(path=str(tmp_path)))
        assert (mine.data.path, mine.run_id) == (str(tmp_path), OWN_TEXT.run_id)
        assert (await made.fetch(reads_text=False)).data.path == NOT_READ


async def test_where_a_volunteer_keeps_the_tokenizer_is_his_own_and_another_is_refused(tmp_path: Path) -> None:
    """The owner's path to a tokenizer in a folder does not travel. A joiner names a copy of it, and is told before
    anything is built if it is another; a later stage needs none."""
    folder, other = made(tmp_path / "owners"), made(tmp_path / "other", vocab_size=259)
    run = with_tokenizer(folder).run
    mine = shutil.copytree(folder, tmp_path / "mine")
    async with swarm() as swarm_of_it:
        swarm_of_it.sound(run)
        error = await swarm_of_it.refusal()
        assert error.exit_code is ExitCode.CONFIG
        assert f"run.data.tokenizer is not set, and run '{run.name}'" in error.message
        assert "--set run.data.tokenizer=DIR" in error.remedy
        joined = await swarm_of_it.fetch(OwnData(tokenizer=str(mine)))
        assert (joined.data.tokenizer, joined.run_id) == (str(mine), run.run_id)
        error = await swarm_of_it.refusal(OwnData(tokenizer=str(other)))
        assert error.exit_code is ExitCode.DATA
        assert f"the tokenizer of run.data.tokenizer ('{other}') is not the run's" in error.message
        assert str(run.data.tokenizer_fingerprint) in error.message
        later = await swarm_of_it.fetch(reads_text=False)
        assert (later.data.tokenizer, later.run_id) == (NOT_READ, run.run_id)


def test_a_folder_that_a_stranger_names_for_a_tokenizer_is_not_taken(tmp_path: Path) -> None:
    """It would be read here, and say whether that is the run's."""
    raw = json.loads(with_tokenizer(made(tmp_path)).run.agreed_json)
    raw["data"]["tokenizer"] = "/etc"
    assert read_agreed(canonical_json(raw).encode()).data.tokenizer == NOT_READ


def test_a_path_that_a_stranger_names_for_a_text_is_not_taken() -> None:
    """It would be read and sent on to the next stage."""
    raw = json.loads(OWN_TEXT.agreed_json)
    raw["data"]["path"] = "/etc/passwd"
    assert read_agreed(canonical_json(raw).encode()).data.path == NOT_READ


@pytest.mark.parametrize(("setting", "place"), [("path", "a/folder"), ("tokenizer", "{here}"), ("tokenizer", "a")])
async def test_a_run_that_names_files_of_this_machine_needs_the_volunteers_word(
    setting: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset's or tokenizer's folder; with the run's own value named it is read, with another it is no part of the
    run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "folder").mkdir(parents=True)
    place = place.format(here=tmp_path)
    source = ["run.data.source=huggingface", f"run.data.path={place if setting == 'path' else 'owner/name'}"]
    spec = load_config(MICRO, source).run
    if setting == "tokenizer":  # a stranger may say so without a fingerprint
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": place})})
    async with swarm() as made:
        made.sound(spec)
        error = await made.refusal()
        assert error.exit_code is ExitCode.CONFIG
        assert f"run.data.{setting}" in error.message
        assert f"--set run.data.{setting}=" in error.remedy
        assert await made.fetch(OwnData.model_validate({setting: place})) == spec
        assert await made.fetch(reads_text=False) == spec
        assert "a joiner takes the run as it is" in (await made.refusal(OwnData.model_validate({setting: "x"}))).remedy


async def test_a_dataset_of_the_hub_needs_no_word() -> None:
    """Nothing on this machine has its name."""
    spec = load_config(MICRO, ["run.data.source=huggingface", "run.data.path=owner/name", "run.data.tokenizer=a/b"]).run
    async with swarm() as made:
        made.sound(spec)
        assert await made.fetch() == spec


@pytest.mark.parametrize("name", ["text", "pandas", "hf://datasets/text"])
async def test_a_run_that_names_a_reader_of_files_for_a_dataset_is_refused(name: str) -> None:
    """The library takes such names for the files of the folder that the volunteer stands in."""
    raw = json.loads(load_config(MICRO, ["run.data.source=huggingface", "run.data.path=owner/name"]).run.agreed_json)
    raw["data"]["path"] = name
    text = canonical_json(raw)
    with pytest.raises(ValueError, match="named as OWNER/NAME"):
        read_agreed(text.encode())
    async with swarm() as made:
        made.says(text.encode(), run=hashlib.sha256(text.encode()).hexdigest()[:32])
        assert "OWNER/NAME" in (await made.refusal()).message


async def test_a_path_for_a_run_that_has_none_is_refused() -> None:
    """It would be another run."""
    async with swarm() as made:
        made.sound()
        assert "it is not set" in (await made.refusal(OwnData(path="book.txt"))).message


async def test_what_travels_is_what_the_run_id_is_the_hash_of() -> None:
    """For each source: read back it has the same run id."""
    for spec in (SPEC, OTHER, OWN_TEXT):
        assert read_agreed(spec.agreed_json.encode()).run_id == spec.run_id


MIXED = load_config(
    MICRO, ["run.data.mixture=[{source: huggingface, path: owner/name}, {source: text, path: /home/owner/secret.txt}]"]
).run


async def test_no_text_of_a_mixture_is_chosen_by_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text has no path but the reader's own; a dataset's name that means something here is not read either. A later
    stage reads none, and a mixture without any of this machine needs no word."""
    assert "secret" not in MIXED.agreed_json
    raw = json.loads(MIXED.agreed_json)
    raw["data"]["mixture"][1]["path"] = "/etc/passwd"
    told = read_agreed(canonical_json(raw).encode())
    assert told.data.mixture[1].path == NOT_READ
    assert told.run_id == read_agreed(MIXED.agreed_json.encode()).run_id == MIXED.run_id
    async with swarm() as made:
        made.sound(MIXED)
        for own in (OwnData(), OwnData(path=str(tmp_path)), OwnData(tokenizer="bytes")):
            error = await made.refusal(own)
            assert error.exit_code is ExitCode.CONFIG
            assert "--data-path 1=PATH" in error.remedy
        assert "run.data.mixture[1]" in (await made.refusal()).message
        assert (await made.fetch(reads_text=False)).data.mixture[1].path == NOT_READ
        prepared = (await made.fetch(OwnData(prepared="tokens"))).data
        assert [part.prepared for part in prepared.parts] == ["tokens/source-00", "tokens/source-01"]
    hub = load_config(MICRO, ["run.data.mixture=[{source: stdlib}, {source: huggingface, path: owner/name}]"]).run
    async with swarm() as made:
        made.sound(hub)
        assert await made.fetch() == hub
        assert "mixes 2 sources" in (await made.refusal(OwnData(path="book.txt"))).message
        monkeypatch.chdir(tmp_path)
        (tmp_path / "owner" / "name").mkdir(parents=True)
        assert "run.data.mixture[1]" in (await made.refusal()).message
        assert await made.fetch(OwnData(paths={"1": "owner/name"})) == hub
        assert "the same on every machine" in (await made.refusal(OwnData(paths={"1": "owner/other"}))).message


async def test_who_joins_a_mixture_names_each_of_its_texts(tmp_path: Path) -> None:
    """By the source's name, or by its number where it has none; the run stays the one that was joined. What is missing
    is named all at once, and so is what no source is."""
    parts = "{source: stdlib}, {source: text, name: code, path: /a}, {source: text, path: /b}"
    several = load_config(MICRO, [f"run.data.mixture=[{parts}]"]).run
    mine = {"code": str(tmp_path / "code"), "2": str(tmp_path / "books")}
    async with swarm() as made:
        made.sound(several)
        joined = await made.fetch(OwnData(paths=mine))
        assert joined.run_id == several.run_id
        assert [part.path for part in joined.data.mixture] == [None, mine["code"], mine["2"]]
        error = await made.refusal()
        assert "run.data.mixture[1] (code), run.data.mixture[2]" in error.message
        assert "--data-path code=PATH --data-path 2=PATH" in error.remedy
        error = await made.refusal(OwnData(paths={"code": "a"}))
        assert "run.data.mixture[2]" in error.message
        assert "code" not in error.message + error.remedy
        error = await made.refusal(OwnData(paths=mine | {"cdoe": "b"}))
        assert "'cdoe'" in error.message
        assert "its texts are code, 2" in error.message
        assert "each one's: --data-path code=PATH" in (await made.refusal(OwnData(path="a"))).remedy
        assert (await made.fetch(reads_text=False)).data.mixture[1].path == NOT_READ
        assert (await made.fetch(OwnData(paths=mine), reads_text=False)).data.mixture[2].path == mine["2"]
    async with swarm() as made:
        made.sound(OWN_TEXT)
        assert "has one text" in (await made.refusal(OwnData(paths={"code": "a"}))).message
