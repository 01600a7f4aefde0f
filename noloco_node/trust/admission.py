"""The peers that may take part in a run, how nodes show and check it, and how long this node itself is invited.

Everyone else's directory records are ignored, and of an outsider's requests only those named `hello...` are answered. A
member's directory record carries its proof. A peer that has not read that record yet refuses. The member then shows the
proof once with `hello.access`, and asks again. The peer remembers it by its authenticated id until the proof expires.

A node warns before its own invitation ends, and leaves when it has ended. Its own clock says when. A node whose clock
is wrong is refused at its start (`checks.check_clock`), and told so while it runs (`ClockWatch`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import LiveRecord
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.invitations import Invitation, Proof, named_invitation
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import PeerTable
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_long, as_utc
from noloco_node.transport.calls import NOTHING, QUESTION_SECONDS, Method, Nothing, call, on
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import WireModel

logger = logging.getLogger(__name__)


class ShownProof(WireModel):
    """The caller's proof that it is invited."""

    proof: Proof


ACCESS = Method("hello.access", ShownProof, Nothing, at_once=4)


class Access:
    """The members of a run as one node knows them. `now` gives seconds since 1970."""

    def __init__(self, spec: RunSpec, proof: Proof | None = None, now: Callable[[], float] = ambient.wall) -> None:
        self._run = spec.run_id
        self._rule = spec.access
        self._now = now
        self._checked = PeerTable[tuple[PeerId, Proof], bool]()
        self._until = PeerTable[PeerId, int](forgotten=self._forgotten)
        """Until when each guest is admitted. Only the owner's signature brings an entry in, while it holds."""
        self._changes = 0
        self._ends: list[int] = []
        """The times when the proofs of peers admitted by one expire, as a heap."""
        self.proof = proof
        """This node's own."""

    def admits(self, peer: PeerId) -> bool:
        """Whether `peer` is known to be a member now."""
        return self._by_name(peer) or self._until.get(peer, 0) > self._now()

    def as_guest(self, peer: PeerId) -> bool:
        """Whether `peer` takes part by invitation only, as long as that lasts."""
        return self._rule.mode == "invited" and not self._by_name(peer)

    def _by_name(self, peer: PeerId) -> bool:
        rule = self._rule
        return rule.mode == "open" or peer == rule.owner or peer in rule.peers

    def shown(self, peer: PeerId, proof: Proof) -> bool:
        """Take in what `peer` shows; whether its signatures hold. A proof is not checked again as long as it is known
        of."""
        place, until = (peer, proof), proof.grant.expires
        if place not in self._checked:
            owner = self._rule.owner
            self._checked[place] = owner is not None and proof.admits(peer, run=self._run, owner=owner)
        holds = self._checked[place]
        if holds and until > max(self._now(), self._until.get(peer, 0)):
            self._until[peer] = until
            self._changes += 1
            heapq.heappush(self._ends, until)
            if len(self._ends) > 2 * len(self._until):  # of guests that were forgotten meanwhile
                self._ends = sorted(self._until.values())
        return holds

    def _forgotten(self, *_: object) -> None:
        self._changes += 1

    @property
    def changes(self) -> int:
        """How often `admits` may have changed its answer so far: proofs that came, expired, or were forgotten."""
        while self._ends and self._ends[0] <= self._now():
            heapq.heappop(self._ends)
            self._changes += 1
        return self._changes

    def deals(self, peer: PeerId, row: LiveRecord) -> bool:
        """Whether a directory record is a member's."""
        if self.admits(peer):
            return True
        proof = row.record.invitation
        return proof is not None and self.shown(peer, proof) and self.admits(peer)

    def serve(self, transport: Transport) -> None:
        """From now on answer members only, and let guests show their proofs."""
        if self._rule.mode == "open":
            return
        transport.guard(self.admits)

        async def handle(peer: PeerId, request: ShownProof) -> Nothing:
            if not self.shown(peer, request.proof):
                raise Refused(Refusal.FORGED, "the invitation is not by the owner of this run, or not for this peer")
            if not self.admits(peer):
                raise Refused(Refusal.NOT_ADMITTED, "the invitation has expired")
            return NOTHING

        on(transport, ACCESS, handle)


class Introduction:
    """Shows this node's proof to peers that ask for it."""

    def __init__(self, transport: Transport, proof: Proof) -> None:
        self._transport = transport
        self._proof = proof
        self._warn_again_at = 0.0

    async def show(self, peer: PeerId, seconds: float) -> None:
        """Show it to `peer` within `seconds`. Raises like `Transport.call`; that it has expired is also logged."""
        shown = ShownProof(proof=self._proof)
        try:
            await call(self._transport, peer, ACCESS, shown, seconds=min(seconds, QUESTION_SECONDS))
        except Refused as refused:
            if refused.reason is Refusal.NOT_ADMITTED and ambient.monotonic() >= self._warn_again_at:
                self._warn_again_at = ambient.monotonic() + 60.0
                ended = as_utc(self._proof.grant.expires)
                logger.warning("peers refuse this node: its invitation ended on %s. Ask the owner for a new one", ended)
            raise


def own_access(spec: RunSpec, setting: str | None, own: PeerId) -> Access:
    """What this node may do in the run, by `node.invitation`.

    Raises UserError: CONFIG where that is no invitation, WRONG_RUN where it is for another run, NOT_ADMITTED where the
    run does not admit this node.
    """
    invitation = None if setting is None else named_invitation(setting)
    if invitation is not None:
        _check_run(spec, invitation)
    access = Access(spec, None if invitation is None else invitation.proof_for(own))
    if access.proof is not None and spec.access.mode == "invited":
        access.shown(own, access.proof)
    if access.admits(own):
        return access
    if spec.access.mode == "listed":
        raise UserError(
            ExitCode.NOT_ADMITTED,
            f"run '{spec.name}' admits {len(spec.access.peers)} peers by name, and this node, {own}, is none of them",
            "use the identity that is listed (--identity), or ask the run's owner to list this one",
        )
    raise _not_invited(spec, invitation, own)


def _check_run(spec: RunSpec, invitation: Invitation) -> None:
    """An invitation is the owner's signature under one RunSpec: no other is accepted with it."""
    if invitation.grant.run != spec.run_id:
        raise UserError(
            ExitCode.WRONG_RUN,
            f"the invitation is for run {invitation.grant.run}, but this is run '{spec.name}' ({spec.run_id})",
            "use the address or the configuration file that belongs to the invitation, or ask for one to this run",
        )
    if spec.access.owner is None or not invitation.grant.holds(spec.access.owner):
        raise UserError(
            ExitCode.NOT_ADMITTED,
            f"the invitation is not signed by the owner of run '{spec.name}' ({spec.access.owner or 'it names none'})",
            "ask the owner of the run for an invitation: noloco-node invite makes one",
        )


def _not_invited(spec: RunSpec, invitation: Invitation | None, own: PeerId) -> UserError:
    if invitation is None:
        return UserError(
            ExitCode.NOT_ADMITTED,
            f"run '{spec.name}' admits only peers that its owner ({spec.access.owner}) has invited",
            "ask the run's owner for an invitation, and pass it with --invitation; if the run is yours, "
            "noloco-node invite CONFIG --key FILE makes one",
        )
    grant = invitation.grant
    if not grant.by_key and grant.subject != own:
        return UserError(
            ExitCode.NOT_ADMITTED,
            f"the invitation is for {grant.subject}, and this node is {own}",
            "use the identity that is invited (--identity), or ask for an invitation for this one",
        )
    return UserError(
        ExitCode.NOT_ADMITTED,
        f"the invitation to run '{spec.name}' ended on {as_utc(grant.expires)}",
        "ask the owner of the run for a new one; if that is in the future, set this machine's clock",
    )


HOUR, DAY = 3600.0, 86400.0
RENEW = "ask the owner of the run for a new one, and start this node again with the same command and --invitation FILE"


def marks_passed(expires: float, since: float, now: float) -> int:
    """The number of passed moments at which a node says that its invitation ends. All in seconds.

    The first is when a tenth of its life is left, but no more than a day. The second is in the last hour, or half of a
    shorter life. Its life is what was left of it when this node started, at `since`: an invitation does not say when it
    was made.
    """
    life, left = max(0.0, expires - since), expires - now
    return sum(left <= mark for mark in {min(DAY, life / 10), min(HOUR, life / 2)})


class OwnInvitation:
    """The invitation that this node, `own`, shows, or None for one that is no guest. `now` gives seconds since 1970."""

    def __init__(self, access: Access, own: PeerId, run_name: str, now: Callable[[], float] = ambient.wall) -> None:
        self._run_name = run_name
        self._now = now
        self._since = now()
        proof = access.proof if access.as_guest(own) else None
        self.expires = math.inf if proof is None else float(proof.grant.expires)
        self._said = 0
        self.emit: Callable[[Warned], None] = lambda warning: logger.warning(warning.detail)
        """Takes warnings for the user that runs the node."""

    async def ends(self) -> UserError:
        """Return why this node must leave, once it must."""
        while True:
            error = self.look()
            if error is not None:
                return error
            await asyncio.sleep(min(LOOK_SECONDS, self.expires - self._now()))

    async def raised_at_its_end(self) -> None:
        """Beside work of which nothing is to be kept: raises UserError (NOT_ADMITTED) once this node must leave."""
        raise await self.ends()

    def look(self) -> UserError | None:
        """Say what is due; at the end return why this node must leave."""
        now = self._now()
        if now >= self.expires:
            return UserError(
                ExitCode.NOT_ADMITTED,
                f"the invitation to run '{self._run_name}' ended on {as_utc(self.expires)}, and peers refuse this node "
                "since",
                f"{RENEW}: it goes on from its checkpoint",
            )
        passed = 0 if self.expires == math.inf else marks_passed(self.expires, self._since, now)
        if passed > self._said:
            self._said, end, left = passed, as_utc(self.expires), as_long(self.expires - now)
            detail = f"this node's invitation ends in {left}, on {end}: then peers refuse it, and it stops; {RENEW}"
            self.emit(Warned(what="invitation_ends", detail=detail))
        return None
