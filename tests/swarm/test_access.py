"""Admission to a run: lists and invitations, checked by every node by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from noloco_node import tallies
from noloco_node.cli.commands import parser
from noloco_node.cli.identity import make_invitation
from noloco_node.config.own_paths import join_line
from noloco_node.config.run_spec import AccessSpec, RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.invitations import Invitation, Proof, invite, read_invitation
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import Bans
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from noloco_node.trust.admission import ACCESS, Access, Introduction, own_access
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.worlds import micro_spec, no_tensors, record_of

LATER = int(time.time()) + 3600
GUEST, OTHER = PeerId("an-invited-peer"), PeerId("somebody-else")


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    """The run's owner."""
    return load_or_create_identity(tmp_path / "owner.key")


def run_of(owner: Identity, mode: str = "invited", **changes: object) -> RunSpec:
    """A run that only guests of the owner take part in."""
    access = AccessSpec.model_validate({"mode": mode, "owner": owner.peer_id, **changes})
    return micro_spec(stages=1).model_copy(update={"access": access})


def complaint(spec: RunSpec, setting: str | None) -> tuple[ExitCode, str]:
    """Exit code and words of a node that is not let in."""
    with pytest.raises(UserError) as raised:
        own_access(spec, setting, GUEST)
    assert raised.value.remedy
    return raised.value.exit_code, raised.value.message


def test_the_run_id_covers_who_may_take_part(owner: Identity) -> None:
    """A change of the list, the mode or the owner makes another run."""
    base = micro_spec(stages=1)
    runs = [base, run_of(owner), run_of(owner, peers=(GUEST,)), run_of(owner, "listed", peers=(GUEST,))]
    assert len({run.run_id for run in runs}) == 4
    for deep in (False, True):
        other = base.model_copy(update={"name": "another"}, deep=deep)
        assert other.run_id != base.run_id, "what a run has worked out once is not its changed copy's"
        assert other.model_copy(update={"name": base.name}, deep=deep).run_id == base.run_id


@pytest.mark.parametrize(
    "access",
    [{"mode": "invited"}, {"mode": "listed"}, {"peers": [GUEST]}, {"mode": "invited", "owner": "QmSomeRsaPeer"}],
)
def test_rules_that_contradict_themselves_are_refused(access: dict[str, object]) -> None:
    """No owner to invite, nobody on the list, a list that nobody reads, a key that cannot be read from its id."""
    with pytest.raises(ValidationError, match=r"access|owner"):
        AccessSpec.model_validate(access)


def test_an_invitation_admits_whom_it_names_to_the_run_it_names(owner: Identity) -> None:
    """It is for a peer by name, or any holder; shown to others without the secret, it is of no use to anybody else."""
    spec = run_of(owner)
    for peer in (GUEST, None):
        text = invite(owner, spec.run_id, LATER, peer).text()
        access = own_access(spec, text, GUEST)
        assert access.proof is not None
        judge = Access(spec)
        assert not judge.admits(GUEST)
        assert not judge.shown(OTHER, access.proof), "a stolen proof"
        assert judge.shown(GUEST, access.proof)
        assert judge.admits(GUEST)
        assert not judge.admits(OTHER)
        seed = read_invitation(text).seed
        assert seed is None or seed not in access.proof.model_dump_json()
        elsewhere = Access(run_of(owner, peers=(OTHER,)))
        assert not elsewhere.shown(GUEST, access.proof), "another run of the same owner"


def test_no_changed_invitation_and_no_other_owners_holds(owner: Identity, tmp_path: Path) -> None:
    """Later, for somebody else, by key instead of by name, or signed by a stranger."""
    spec, stranger = run_of(owner), load_or_create_identity(tmp_path / "stranger.key")
    named, held = (invite(owner, spec.run_id, LATER, peer) for peer in (GUEST, None))
    forged: list[Proof] = []
    for invitation in (named, held):
        proof = invitation.proof_for(GUEST)
        changes = ({"expires": LATER + 1}, {"subject": OTHER}, {"by_key": not proof.grant.by_key})
        forged += [proof.model_copy(update={"grant": proof.grant.model_copy(update=change)}) for change in changes]
    forged.append(invite(stranger, spec.run_id, LATER, GUEST).proof_for(GUEST))
    forged.append(held.proof_for(GUEST).model_copy(update={"holder": held.proof_for(OTHER).holder}))
    forged.append(held.proof_for(GUEST).model_copy(update={"holder": None}))
    judge = Access(spec)
    assert [judge.shown(GUEST, proof) for proof in forged] == [False] * len(forged)
    assert judge.shown(GUEST, named.proof_for(GUEST))


def test_membership_ends_with_the_invitation(owner: Identity) -> None:
    """Every member stops talking to the guest by itself."""
    spec, now = run_of(owner), [0.0]
    judge = Access(spec, now=lambda: now[0])
    assert judge.shown(GUEST, invite(owner, spec.run_id, 100, GUEST).proof_for(GUEST))
    assert judge.admits(GUEST)
    now[0] = 100.0
    assert not judge.admits(GUEST)
    assert judge.admits(owner.peer_id)


def test_who_is_not_let_in_is_told_why_in_one_sentence(owner: Identity, tmp_path: Path) -> None:
    """Each case with its own exit code and what to do about it."""
    spec, other = run_of(owner), run_of(owner, peers=(OTHER,))
    stranger = load_or_create_identity(tmp_path / "stranger.key")
    ended = invite(owner, spec.run_id, 1_000_000, GUEST).text()
    cases: list[tuple[RunSpec, str | None, ExitCode, str]] = [
        (spec, None, ExitCode.NOT_ADMITTED, "admits only peers that its owner"),
        (spec, ended, ExitCode.NOT_ADMITTED, "ended on 1970-01-12 13:46 UTC"),
        (spec, invite(owner, spec.run_id, LATER, OTHER).text(), ExitCode.NOT_ADMITTED, f"is for {OTHER}"),
        (spec, invite(stranger, spec.run_id, LATER, GUEST).text(), ExitCode.NOT_ADMITTED, "not signed by the owner"),
        (spec, invite(owner, other.run_id, LATER, GUEST).text(), ExitCode.WRONG_RUN, other.run_id),
        (spec, invite(owner, spec.run_id, LATER, GUEST).text()[:-7], ExitCode.CONFIG, "cut off or changed"),
        (spec, "no-such-file", ExitCode.CONFIG, "no-such-file"),
        (run_of(owner, "listed", peers=(OTHER,)), None, ExitCode.NOT_ADMITTED, "this node, an-invited-peer"),
    ]
    for run, setting, code, words in cases:
        found, message = complaint(run, setting)
        assert found == code, message
        assert words in message
        assert "\n" not in message


def test_with_an_invitation_a_node_accepts_only_the_run_that_the_owner_signed(owner: Identity) -> None:
    """In an open run too: the invitation is the owner's signature under the RunSpec."""
    spec = run_of(owner, "open")
    assert own_access(spec, invite(owner, spec.run_id, LATER, None).text(), GUEST).admits(OTHER)
    slower = spec.model_copy(update={"inner": spec.inner.model_copy(update={"learning_rate": 1.0})})
    code, message = complaint(slower, invite(owner, spec.run_id, LATER, None).text())
    assert code is ExitCode.WRONG_RUN
    assert slower.run_id in message


def test_the_command_signs_its_owners_runs_only(owner: Identity, tmp_path: Path) -> None:
    """A missing key is made and its id said, for the configuration; an invitation read back is what was meant."""
    with pytest.raises(UserError, match=r"access\.owner names none") as raised:
        make_invitation(micro_spec(stages=1), tmp_path / "new.key", peer=None, hours=1)
    assert load_or_create_identity(tmp_path / "new.key").peer_id in raised.value.remedy
    assert "was made now" in raised.value.message
    assert "run.access.mode: invited" in raised.value.remedy
    with pytest.raises(UserError, match=r"access\.owner names none") as raised:
        make_invitation(micro_spec(stages=1), tmp_path / "new.key", peer=None, hours=1)
    assert "was made now" not in raised.value.message
    for mode in ("open", "listed"):
        with pytest.raises(UserError, match=f"mode is '{mode}', where nobody is asked for an invitation"):
            make_invitation(run_of(owner, mode, peers=(GUEST,) * (mode == "listed")), owner.path, peer=None, hours=1)
    with pytest.raises(UserError, match="--hours"):
        make_invitation(run_of(owner), owner.path, peer=None, hours=0)
    spec, guest = run_of(owner), load_or_create_identity(tmp_path / "guest.key").peer_id
    for mistyped in ("abc", "notapeeridatall", guest[:-1]):
        with pytest.raises(UserError, match=f"--peer is '{mistyped}', no peer id"):
            make_invitation(spec, owner.path, peer=mistyped, hours=2)
    text, lines = make_invitation(spec, owner.path, peer=guest, hours=2)
    grant = read_invitation(f"\n {text[:40]}\n{text[40:]} ").grant
    assert (grant.run, grant.subject, grant.by_key) == (spec.run_id, guest, False)
    assert abs(grant.expires - time.time() - 7200) < 60
    assert time.strftime("until %Y-%m-%d %H:%M UTC", time.gmtime(grant.expires)) in lines[1]


def test_a_mistyped_key_of_a_run_that_has_an_owner_makes_none(owner: Identity, tmp_path: Path) -> None:
    """A new key would be another owner's: neither it nor its folder is made, and the path and both ways on are said."""
    mistyped = tmp_path / "nokey" / "owner.key"
    with pytest.raises(UserError) as raised:
        make_invitation(run_of(owner), mistyped, peer=None, hours=1)
    assert not mistyped.parent.exists()
    assert raised.value.exit_code is ExitCode.CONFIG
    assert str(mistyped) in raised.value.message
    assert owner.peer_id in raised.value.message
    assert "identity import" in raised.value.remedy


@pytest.mark.parametrize(
    ("changes", "stages", "told"),
    [
        ({}, 1, [""]),
        ({"source": "text", "path": "book.txt"}, 1, [" --data-path PATH", "copy of the run's text"]),
        ({"source": "text", "path": "b.txt"}, 2, [" --data-path PATH", "and serves a later stage"]),
        (
            {"source": "text", "path": "b.txt", "tokenizer": "t", "tokenizer_fingerprint": "tokenizer-" + "0" * 32},
            2,
            [" --data-path PATH --set run.data.tokenizer=DIR", "and serves a later stage"],
        ),
    ],
)
def test_what_an_invitation_says_to_type_names_what_the_guest_brings(
    changes: dict[str, Any], stages: int, told: list[str], owner: Identity
) -> None:
    """The places of texts and a tokenizer of which each has its own: `join` ends without them."""
    access, spec = AccessSpec(mode="invited", owner=owner.peer_id), micro_spec(stages=stages)
    spec = spec.model_copy(update={"access": access, "data": spec.data.model_copy(update=changes)})
    line, *note = make_invitation(spec, owner.path, peer=None, hours=1)[1][2:]
    assert line == f"  join with: noloco-node join ADDRESS --host 0.0.0.0 --port 31337 --invitation FILE{told[0]}"
    assert all(words.endswith(end) for words, end in zip(note, told[1:], strict=True))


@pytest.mark.parametrize(
    ("address", "listening"),
    [
        ("/ip4/127.0.0.1/tcp/1/p2p/Q", ""),
        ("/ip6/::1/tcp/1/p2p/Q", ""),
        ("/ip4/203.0.113.5/tcp/1/p2p/Q", " --host 0.0.0.0 --port 31337"),
        ("/ip6/2001:db8::1/tcp/1/p2p/Q", " --host :: --port 31337"),
    ],
)
def test_a_join_line_is_typed_as_it_stands_and_listens_where_others_reach(address: str, listening: str) -> None:
    """No word in it is a remark, on which a shell stumbles; a node that nobody could reach would take a relay."""
    spec = micro_spec(stages=2)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"source": "text", "path": "b.txt"})})
    line = join_line(spec, address)
    assert line == f"noloco-node join {address}{listening} --data-path PATH"
    assert parser().parse_args(line.split()[1:]).call


@dataclasses.dataclass
class Pair:
    """A member, and a guest that it has never heard of."""

    member: MemoryTransport
    guest: MemoryTransport
    access: Access
    asked: list[PeerId]

    async def ask(self, method: str, *, proof: Proof | None) -> Message:
        """The guest's call."""
        self.guest.introduce_with(None if proof is None else Introduction(self.guest, proof).show)
        return await self.guest.call(self.member.peer_id, method, Message(), timeout=5, progress=5, max_answer_bytes=0)


@contextlib.asynccontextmanager
async def pair(spec: RunSpec) -> AsyncIterator[Pair]:
    """Both in memory; the member serves one method of members and one of everyone."""
    network = MemoryNetwork()
    made = Pair(MemoryTransport(network, PeerId("a-member")), MemoryTransport(network, GUEST), Access(spec), [])

    async def handle(peer: PeerId, _: Message) -> Message:
        made.asked.append(peer)
        return Message()

    made.access.serve(made.member)
    for method in ("work", "hello"):
        made.member.serve(method, no_tensors, handle, max_concurrent_per_peer=1)
    try:
        yield made
    finally:
        await made.member.close()
        await made.guest.close()


async def test_a_guest_shows_its_proof_once_and_is_served_from_then_on(owner: Identity) -> None:
    """Only `hello` is answered before."""
    spec = run_of(owner)
    proof = invite(owner, spec.run_id, LATER, None).proof_for(GUEST)
    async with pair(spec) as made:
        await made.ask("hello", proof=None)
        with pytest.raises(Refused) as refused:
            await made.ask("work", proof=None)
        assert refused.value.reason is Refusal.NOT_ADMITTED
        await made.ask("work", proof=proof)
        await made.ask("work", proof=None)
        assert made.asked == [GUEST] * 3
        assert made.member.refusals_given == {Refusal.NOT_ADMITTED: 2}
        assert made.member.conduct.offences.total() == 0


async def test_forged_and_expired_proofs_are_refused_and_forging_is_an_offence(owner: Identity) -> None:
    """Having been invited until yesterday is none."""
    spec = run_of(owner)
    async with pair(spec) as made:
        for proof, reason in (
            (invite(owner, spec.run_id, 1, GUEST).proof_for(GUEST), Refusal.NOT_ADMITTED),
            (invite(owner, spec.run_id, LATER, OTHER).proof_for(OTHER), Refusal.FORGED),
        ):
            with pytest.raises(Refused) as refused:
                await made.ask("work", proof=proof)
            assert refused.value.reason is reason
        assert made.asked == []
        assert made.member.conduct.offences == {"forged": 1}
        with pytest.raises(Refused) as refused:
            await made.guest.call(
                made.member.peer_id, ACCESS.name, Message({"proof": 7}), timeout=5, progress=5, max_answer_bytes=0
            )
        assert refused.value.reason is Refusal.MALFORMED


@pytest.mark.parametrize("strangers", [True, False])
def test_who_has_renewed_its_invitation_stays_a_member_whatever_others_show(
    owner: Identity, monkeypatch: pytest.MonkeyPatch, strangers: bool
) -> None:
    """Forged proofs by the thousand push nobody out; members beyond those that are remembered are let in again as soon
    as they show theirs."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 50)
    spec = run_of(owner)
    access = Access(spec)
    old, new = (invite(owner, spec.run_id, LATER + after, GUEST).proof_for(GUEST) for after in (0, 1000))
    assert access.shown(GUEST, old)
    assert access.shown(GUEST, new)
    forged = invite(owner, spec.run_id, LATER, OTHER).proof_for(OTHER)
    for number in range(120):
        peer = PeerId(f"peer-{number}")
        if strangers:
            assert not access.shown(peer, forged)
            assert access.admits(GUEST)
        else:
            assert access.shown(peer, invite(owner, spec.run_id, LATER, None).proof_for(peer))
    assert access.admits(GUEST) == strangers
    for shown in (old, new):
        assert access.shown(GUEST, shown)
        assert access.admits(GUEST)


def test_an_invitation_that_has_ended_takes_nobodys_place(owner: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ids are made up under it."""
    monkeypatch.setattr(tallies, "MOST_PEERS", 50)
    spec = run_of(owner)
    access, ended = Access(spec), invite(owner, spec.run_id, 1, None)
    assert access.shown(GUEST, invite(owner, spec.run_id, LATER, GUEST).proof_for(GUEST))
    for number in range(120):
        peer = PeerId(f"peer-{number}")
        assert access.shown(peer, ended.proof_for(peer))
        assert not access.admits(peer)
    assert access.admits(GUEST)


async def test_records_of_outsiders_are_ignored_and_members_carry_their_proof(owner: Identity) -> None:
    """Only peers that the owner has named or invited are in the view."""
    spec, hub = run_of(owner, peers=("a-listed-peer",)), MemoryDirectoryHub(1)
    invitation: Invitation = invite(owner, spec.run_id, LATER, None)
    judge = Access(spec)
    for peer, proof in (
        (GUEST, invitation.proof_for(GUEST)),
        (OTHER, None),
        (PeerId("a-thief-of-proofs"), invitation.proof_for(GUEST)),
        (PeerId("a-listed-peer"), None),
    ):
        directory = ScreenedDirectory(MemoryDirectory(hub), Bans(), proof)
        assert await directory.publish(record_of(peer), 60)
    screened = ScreenedDirectory(MemoryDirectory(hub), judge)
    view = await screened.refresh()
    assert sorted(view.stages[0]) == ["a-listed-peer", GUEST]
