"""State transfer in the life of one replica: it takes a stage peer's state, and gives its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.state_transfer.donor import StateDonor
from noloco_node.state_transfer.donor_choice import StateCopier
from noloco_node.transport.interface import Withdraw

DONOR_PLACES = 2
"""Late joiners that may copy a node's state at once; others are told `busy` and ask another node."""


class StateTransfer(Participant):
    """`believe` turns a donor's claimed clock into the one to take over; peers that `relayed` says are connected
    through a relay only are given nothing."""

    def __init__(
        self,
        context: ReplicaContext,
        believe: Callable[[float], float],
        relayed: Callable[[PeerId], Awaitable[bool]],
    ) -> None:
        spec, worker = context.spec, context.worker
        self.donor = StateDonor(
            spec,
            context.stage,
            context.transport,
            worker,
            places=DONOR_PLACES,
            relayed=relayed,
            folder=context.settings.run_folder,
        )
        self.copier = StateCopier(
            spec,
            context.stage,
            context.transport,
            worker,
            believe=believe,
            emit=context.emit,
            rng=context.rng,
            folder=context.settings.run_folder,
        )

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the donor's methods."""
        return self.donor.serve()

    def open(self) -> None:
        """Give the own state from now on."""
        self.donor.open()

    def shut(self) -> None:
        """Give it to nobody from now on; a reader that has begun goes on."""
        self.donor.shut()

    def drain(self) -> None:
        """A leaving node gives its state as long as it is there: it may be the last of its stage."""

    def close(self) -> None:
        """Free the snapshot."""
        self.donor.let_go()
