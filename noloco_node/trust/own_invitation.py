"""How long this node is invited: it warns before its invitation ends, and finds out afterwards whether peers still deal
with it.

Its own clock alone ends nothing: it may be wrong. The word of one peer does not either while others let it in. Most of
the asked peers must refuse it. Clocks of a swarm differ by three seconds at most (`checks.CLOCK_LIMIT_SECONDS`), so
that all of them do soon after the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.directory.records import Directory, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_long, as_utc
from noloco_node.transport.calls import ASKED_AT_ONCE, QUESTION_SECONDS, call
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport
from noloco_node.trust.admission import ACCESS, Access, ShownProof

logger = logging.getLogger(__name__)

HOUR, DAY = 3600.0, 86400.0
LOOK_SECONDS = 5.0
AGAIN_SECONDS, AGAIN_LATER_SECONDS = 1.0, 30.0
"""Seconds between two rounds of questions: in the first minute after the end, and later. In that minute the peers whose
invitations end with this one leave."""
RENEW = "ask the owner of the run for a new one, and start this node again with the same command and --invitation FILE"


def marks_passed(expires: float, since: float, now: float) -> int:
    """The number of passed moments at which a node says that its invitation ends. All in seconds.

    The first is when a tenth of its life is left, but no more than a day. The second is in the last hour, or half of a
    shorter life, and the third at the end. Its life is what was left of it when this node started, at `since`: an
    invitation does not say when it was made.
    """
    life, left = max(0.0, expires - since), expires - now
    return sum(left <= mark for mark in {min(DAY, life / 10), min(HOUR, life / 2), 0.0})


class OwnInvitation:
    """The invitation that this node shows, or None for one that is no guest.

    `directory` is the one with outsiders in it. A peer that was invited with this node, until the same moment, is one
    of them by then. `now` gives seconds since 1970.
    """

    def __init__(
        self,
        access: Access,
        transport: Transport,
        directory: Directory,
        run_name: str,
        now: Callable[[], float] = ambient.wall,
    ) -> None:
        self._access = access
        self._transport = transport
        self._directory = directory
        self._run_name = run_name
        self._now = now
        self._since = now()
        self._proof = access.proof if access.as_guest(transport.peer_id) else None
        self.expires = math.inf if self._proof is None else float(self._proof.grant.expires)
        self._said = 0
        self._words: dict[PeerId, tuple[bool, float]] = {}
        """For each asked peer: whether it refuses this node, and when it said so, monotonic."""
        self._chance = ambient.chance()
        self.emit: Callable[[Warned], None] = lambda warning: logger.warning(warning.detail)
        """Takes warnings for the user that runs the node."""

    async def ends(self) -> UserError:
        """Return why this node must leave, once it must."""
        while True:
            error = await self.look()
            if error is not None:
                return error
            await asyncio.sleep(self._pause())

    async def raised_at_its_end(self) -> None:
        """Beside work of which nothing is to be kept: raises UserError (NOT_ADMITTED) once this node must leave."""
        raise await self.ends()

    async def look(self) -> UserError | None:
        """Say what is due; after the end ask others, and return why this node must leave if they refuse it."""
        now = self._now()
        if now >= self.expires and await self._is_refused():
            return UserError(
                ExitCode.NOT_ADMITTED,
                f"the invitation to run '{self._run_name}' ended on {as_utc(self.expires)}, and peers refuse this node "
                "since",
                f"{RENEW}: it goes on from its checkpoint",
            )
        self._say_what_is_due(now)
        return None

    def _pause(self) -> float:
        left = self.expires - self._now()
        if left > 0.0:
            return min(left, LOOK_SECONDS)
        return AGAIN_SECONDS if left > -ANSWER_SECONDS else AGAIN_LATER_SECONDS

    def _say_what_is_due(self, now: float) -> None:
        passed = 0 if self._proof is None else marks_passed(self.expires, self._since, now)
        if passed > self._said:
            self._said = passed
            end, left = as_utc(self.expires), self.expires - now
            detail = (
                f"this node's invitation ends in {as_long(left)}, on {end}: then peers refuse it, and it stops; {RENEW}"
                if left > 0.0
                else f"this node's invitation ended on {end}: it stops as soon as peers refuse it for that; {RENEW}"
            )
            self.emit(Warned(what="invitation_ends", detail=detail))

    async def _is_refused(self) -> bool:
        """Tell whether most of those that have said anything since the end refuse this node. A peer that has left
        meanwhile is not asked again, and its refusal counts: all guests may leave in the same moment."""
        await asyncio.gather(*map(self._ask, self._whom_to_ask()))
        now = ambient.monotonic()
        counting = [refuse for refuse, at in self._words.values() if refuse or now - at <= ANSWER_SECONDS]
        return 2 * sum(counting) > len(counting)

    async def _ask(self, peer: PeerId) -> None:
        assert self._proof is not None
        try:
            await call(self._transport, peer, ACCESS, ShownProof(proof=self._proof), seconds=QUESTION_SECONDS)
            refused = False
        except Refused as answer:
            if answer.reason is not Refusal.NOT_ADMITTED:
                return  # it is busy, or bans this node: no word about the invitation
            refused = True
        except TransportError:
            return
        self._words[peer] = refused, ambient.monotonic()

    def _whom_to_ask(self) -> list[PeerId]:
        """The peers to ask: some members, or if this node knows of none, some of those that were. Outsiders have no
        say."""
        now, own, access = self._directory.now(), self._transport.peer_id, self._access
        there = {
            peer: row
            for rows in self._directory.view.stages
            for peer, row in rows.items()
            if peer != own and row.expires > now and row.record.state is not PeerState.GONE
        }
        members = [peer for peer, row in there.items() if access.deals(peer, row)]
        asked = sorted(members or (peer for peer, row in there.items() if access.has_let_in(peer, row)))
        return self._chance.sample(asked, min(ASKED_AT_ONCE, len(asked)))
