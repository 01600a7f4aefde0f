"""Nodes of a simulated swarm, many at once."""

from __future__ import annotations

from noloco_node.simulator.world import World


def populate(world: World, replicas: int) -> None:
    """Start so many replicas of every stage at once, those of stage 0 first."""
    for stage in range(world.spec.stages):
        for _ in range(replicas):
            world.start(stage)
