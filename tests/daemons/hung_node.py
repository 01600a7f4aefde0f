"""A real daemon a part of which hangs: what the environment names never comes to its end.

Run as `python -m tests.daemons.hung_node run ...`. It says HANGS in its log once it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import NoReturn

import torch

from noloco_node.node import journey, stay, way_out
from noloco_node.node.replica import Replica
from noloco_node.training import compute_thread
from noloco_node.training.compute_thread import Priority
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from tests.chaos import paced_node

PART = "NOLOCO_CHAOS_HANGS"
LONGER_THAN_ANY_TEST = 3600.0


def on_a_thread(*_: object, **__: object) -> NoReturn:
    """As a disk that does not answer."""
    logging.getLogger("noloco_node").warning("HANGS")
    while True:
        time.sleep(LONGER_THAN_ANY_TEST)


async def on_a_lost_device(self: StageWorker, *_: object, **__: object) -> NoReturn:
    """As a GPU whose driver was reset, found by a call of which nobody but its sender is told."""

    def work() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nFor debugging consider")

    await asyncio.gather(self._thread.run(Priority.STEP, work), return_exceptions=True)  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(LONGER_THAN_ANY_TEST)
    raise AssertionError


def on_a_full_device(*_: object, **__: object) -> NoReturn:
    """As a GPU on which something else has taken what was left."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def main() -> None:
    """The command line of `noloco-node`, on a paced device. Its last words come to their end on a busy machine."""
    way_out.SAY_SECONDS = 60.0
    match os.environ[PART]:
        case "building":
            journey.build_stage = on_a_thread
        case "weights":
            stay.save_stage = on_a_thread
        case "loop":
            Replica.close = on_a_thread
        case "device":
            StageWorker.loss = on_a_lost_device
        case "memory":
            StageTrainer.loss = on_a_full_device
            compute_thread.STARVED_SECONDS = 2.0
        case part:
            raise ValueError(part)
    paced_node.main()


if __name__ == "__main__":
    sys.argv[0] = "noloco-node"
    main()
