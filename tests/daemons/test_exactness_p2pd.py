"""Exactness over the real network: two p2pd processes, the DHT, and framed streams change nothing in the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.transport.libp2p import Libp2pTransport
from tests.support import nothing_left_behind, p2pd_children
from tests.test_exactness import STEPS, run_and_compare
from tests.worlds import libp2p_world, micro_spec


@pytest.fixture
def traceless(tmp_path: Path) -> Iterator[Path]:
    """A folder for identities; afterwards no p2pd, socket or temporary folder may be left."""
    with nothing_left_behind():
        yield tmp_path


@pytest.mark.daemons
async def test_two_stages_over_p2pd_equal_single_process_training(traceless: Path) -> None:
    """Twenty inner steps in fp32 over real streams, the stages having found each other through the DHT."""
    spec = micro_spec(stages=2, steps=STEPS)
    async with libp2p_world(spec, traceless) as made:
        assert len(p2pd_children()) >= 2
        await run_and_compare(made, spec)
        transport = made.replicas[1].context.transport
        assert isinstance(transport, Libp2pTransport)
        activations = STEPS * 4 * 16 * 32 * 4
        assert transport.traffic.received["microbatch"] > activations, "it must have come over the streams"
