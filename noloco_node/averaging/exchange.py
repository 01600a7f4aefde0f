"""One weight exchange between two replicas of a stage: propose, openings, chunks, commit.

Every step is a request with an answer, so an exchange needs no stream of its own. The dialler sends its chunk and the
partner answers with its own; several are in flight on pooled streams. Training goes on meanwhile. A side commits once
it holds the partner's whole payload, verified and finite; otherwise nothing changes there.

It may happen that only one side commits: no protocol can exclude it, and it is legal. It shifts the mean over N
replicas by half the difference / N.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from noloco_node.aio import run_to_end
from noloco_node.averaging.dialler import Dialler
from noloco_node.averaging.engagement import Change, Phase
from noloco_node.averaging.responder import Responder
from noloco_node.averaging.side import Side
from noloco_node.directory.peer_clocks import PeerClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.peers.probation import ProbationStanding
from noloco_node.telemetry.events import OuterStep
from noloco_node.transport.interface import Withdraw


class Exchanger(Side):
    """This replica's outer steps: dials, answers, and steps alone; at most one exchange at a time.

    `run()` must be running in the owner's task group. `on_outer_step` receives an event for every commit, and for every
    exchange that was agreed and came to nothing. `ReplicaContext.moved` fires when one has ended or a catch-up is due.
    A fragment is named by its index; None is the whole stage, also where it is cut into one.
    """

    def __init__(
        self,
        context: ReplicaContext,
        *,
        clocks: PeerClocks,
        standing: ProbationStanding,
        on_outer_step: Callable[[OuterStep], None],
        accepting: Callable[[], bool],
    ) -> None:
        super().__init__(context, clocks=clocks, standing=standing, on_outer_step=on_outer_step, accepting=accepting)
        self._dialler = Dialler(self)
        self.responder = Responder(self)

    @property
    def engaged(self) -> bool:
        """True while an exchange is open or proposed, or a stage peer's state is being taken over."""
        return self.engagement.phase is not Phase.FREE

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the methods with the transport, and how each is taken back."""
        return self.responder.serve()

    async def run(self) -> None:
        """Commit exchanges that others dialled, and give up those that make no progress, until cancelled. What is not
        complete is over then."""
        try:
            await self.responder.run()
        finally:
            self.responder.leave()
            await run_to_end(self.stop())

    async def dial(self, partner: PeerId, fragment: int | None = None) -> bool:
        """Average a fragment with `partner`; True when committed. The partner can make it raise nothing.

        An agreed exchange that came to nothing is an event. A proposal that was refused or not answered is none.
        """
        return await self._dialler.dial(partner, fragment)

    async def step_alone(self, fragment: int | None = None) -> None:
        """The outer step of a fragment without a partner. Raises NotAllowed where this replica is engaged."""
        await self._dialler.step_alone(fragment)

    @contextmanager
    def taking_state(self) -> Generator[None]:
        """While a stage peer's state is fetched and loaded in this block no exchange may open. Raises NotAllowed where
        this replica is engaged."""
        self.engagement.begin(Change.TAKE_STATE)
        try:
            yield
        finally:
            self.engagement.go_on(None, Change.STATE_TAKEN)
