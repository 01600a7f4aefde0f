"""What the protocols of one replica share, and what each of them is to the replica that lives by them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from noloco_node.aio import Pulse
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.cut import StageCut
from noloco_node.telemetry.events import AnyEvent
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.interface import Transport, Withdraw


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """What every protocol of a replica works with. It holds no weights: `worker` lets go of them when the replica ends,
    and another may take its place."""

    spec: RunSpec
    settings: NodeSettings
    cut: StageCut
    transport: Transport
    worker: StageWorker
    rng: random.Random
    """Draws routes and partners."""
    moved: Pulse
    """Fires whenever something has changed that somebody may wait for: a step, an exchange, the directory."""
    emit: Callable[[AnyEvent], None]

    @property
    def stage(self) -> int:
        """Index of the replica's stage."""
        return self.cut.index


class Participant:
    """A protocol in the life of a replica: `serve`, `open`, `run` beside the training, `drain`, `shut`, `close`. Each
    does nothing more where a participant has nothing to do."""

    def serve(self) -> tuple[Withdraw, ...]:
        """Register the methods with the transport, and how each is taken back; nothing is accepted before `open`."""
        return ()

    def open(self) -> None:
        """Accept what peers ask from now on."""

    def shut(self) -> None:
        """Accept nothing from now on that somebody may do without; what is under way goes on."""

    async def run(self) -> None:
        """Work beside the training, until cancelled."""

    def drain(self) -> None:
        """The replica has been told to leave: accept nothing that it would have to finish."""
        self.shut()

    @property
    def under_way(self) -> bool:
        """Whether something is unfinished that a replica finishes before it leaves."""
        return False

    def hand_back(self) -> None:
        """The time to finish is over: tell the waiting peers."""

    def close(self) -> None:
        """Let go of what it holds; the replica has ended."""
