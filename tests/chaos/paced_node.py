"""A real daemon whose device has a speed of its own: every forward and backward takes a set time and no processor.

The environment gives one number of seconds for both, or two with a comma between: a forward's and a backward's. The
last stage does its whole work on a microbatch in what counts as a forward. Where the device stands for a quicker one,
the environment names that stretch of time too, and what the routing counts in seconds is as many times as long.

On one machine the replicas of a plain swarm share its cores, so killing one makes the others faster. With a paced
device a replica's speed is its own, as on machines of their own, and ratios of throughput mean something. No other node
is nearby for it either: a fault of p2pd or of a link is one for all that it sends.
Run as `python -m tests.chaos.paced_node run ...`; the time comes from the environment. Where the environment names a
door, the process loads its libraries, says that it is ready, and begins once somebody opens the door.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from noloco_node.cli import main as cli
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import journey as node
from noloco_node.node import network
from noloco_node.pipeline import activations, admission, routing
from noloco_node.training.compute_thread import OWN, ComputeThread, DeviceWaits, Priority, QueueTurn
from noloco_node.training.host_copies import Ahead
from noloco_node.transport.pool import StreamHandler
from noloco_node.transport.same_machine import SameMachine

T = TypeVar("T")

OPERATION_SECONDS = "NOLOCO_CHAOS_OPERATION_SECONDS"
STRETCH = "NOLOCO_CHAOS_STRETCH"
DOOR = "NOLOCO_CHAOS_DOOR"
"""Path of a FIFO that is there. In life a newcomer loads libraries on a machine of its own; here it would take the
processor from nodes that train."""
READY = "ready"
"""A process that waits to be told to begin prints this."""


class PacedThread(ComputeThread):
    """Works no faster than the environment says."""

    async def run(
        self,
        priority: Priority,
        work: Callable[[], T],
        turn: QueueTurn = OWN,
        waits: DeviceWaits | None = None,
        ahead: Ahead | None = None,
    ) -> T:
        """See `ComputeThread.run`."""
        forward, _, backward = os.environ[OPERATION_SECONDS].partition(",")
        seconds = float(backward if backward and priority is Priority.BACKWARD else forward)

        def paced() -> T:
            due = time.monotonic() + seconds
            result = work()
            time.sleep(max(0.0, due - time.monotonic()))
            return result

        return await super().run(priority, work if priority is Priority.STEP else paced, turn, waits, ahead)


class Alone(SameMachine):
    """As on a machine without another node."""

    async def serve(self, handler: StreamHandler, within: float) -> None:
        """See `SameMachine.serve`."""

    async def open(self, peer: PeerId) -> None:
        """See `SameMachine.open`."""


def wait_at_door(door: Path) -> None:
    """Load what a node loads as it starts, and return once another process has opened the door."""
    importlib.import_module("noloco_node.node.daemon")
    importlib.import_module("transformers.models.llama.modeling_llama")
    print(READY, flush=True)
    door.open("rb").close()


def open_door(door: Path) -> None:
    """Let the process begin that waits there. It must have said that it is ready."""
    door.open("wb").close()


def main() -> None:
    """The command line of `noloco-node`, on a paced device."""
    if DOOR in os.environ:
        wait_at_door(Path(os.environ[DOOR]))
    node.ComputeThread = PacedThread
    network.SameMachine = Alone
    stretch = float(os.environ.get(STRETCH, "1"))
    admission.ASK_SECONDS *= stretch
    activations.ASK_SECONDS *= stretch
    routing.LOAD_LIFE_SECONDS *= stretch
    cli.entry()


if __name__ == "__main__":
    sys.argv[0] = "noloco-node"
    main()
