"""Averaging in the life of one replica: its exchanger, and its view of which stage peers count in an average."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.averaging.exchange import Exchanger
from noloco_node.directory.peer_clocks import PeerClocks
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.peers.probation import Ending, ProbationStanding
from noloco_node.telemetry.events import OuterStep
from noloco_node.transport.interface import Withdraw


class Averaging(Participant):
    """Takes outer steps when told to, and answers stage peers that ask for one. `on_outer_step` is that of `Exchanger`;
    `on_probation_end` receives why, and after how many inner steps, this replica counts itself."""

    def __init__(
        self,
        context: ReplicaContext,
        clocks: PeerClocks,
        on_outer_step: Callable[[OuterStep], None],
        on_probation_end: Callable[[Ending, int], None],
    ) -> None:
        self.standing = ProbationStanding(
            context.spec.outer.inner_steps, on_probation_end, context.transport.peer_stats.book
        )
        self.exchanger = Exchanger(
            context,
            clocks=clocks,
            standing=self.standing,
            on_outer_step=on_outer_step,
            accepting=lambda: self.accepting,
        )

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the methods of an exchange."""
        return self.exchanger.serve()

    async def run(self) -> None:
        """Commit what others dialled."""
        await self.exchanger.run()

    @property
    def under_way(self) -> bool:
        """Whether an exchange is open."""
        return self.exchanger.engaged
