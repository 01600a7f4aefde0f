"""How long this node is invited: it warns before its invitation ends, and leaves when it has ended.

Its own clock says when. A node whose clock is wrong is refused at its start (`checks.check_clock`), and told so while
it runs (`ClockWatch`). All nodes of a run judge an invitation by clocks that differ by seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_long, as_utc
from noloco_node.trust.admission import Access

logger = logging.getLogger(__name__)

HOUR, DAY = 3600.0, 86400.0
LOOK_SECONDS = 5.0
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
