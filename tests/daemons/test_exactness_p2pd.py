"""Exactness over the real network: two p2pd processes, the DHT, and framed streams change nothing in the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.transport.libp2p import Libp2pTransport
from tests.support import p2pd_children
from tests.test_exactness import STEPS, run_and_compare
from tests.worlds import libp2p_world, micro_spec


@pytest.mark.daemons
async def test_two_stages_over_p2pd_equal_single_process_training(tmp_path: Path, temporary: Path) -> None:
    """A dozen inner steps in fp32 over real streams, the stages having found each other through the DHT."""
    spec = micro_spec(layers=4, stages=2, steps=STEPS)
    async with libp2p_world(spec, tmp_path) as made:
        assert len(p2pd_children()) >= 2
        await run_and_compare(made, spec)
        transport = made.replicas[1].context.transport
        assert isinstance(transport, Libp2pTransport)
        activations = STEPS * 4 * 16 * 32 * 4
        assert transport.traffic.received["microbatch"] > activations, "it must have come over the streams"
