"""Crowds by events, from their settings to what was found of each size."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from noloco_node import collector
from noloco_node.config.crowd_spec import CrowdSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.crowd import Crowd, CrowdMoment, most_nodes
from noloco_node.simulator.crowd_figures import CrowdFigures, CrowdRun
from noloco_node.sizing.memory import free_memory

NODE_BYTES = 56_000
"""A node needs at most so many bytes, with the books of its peers. It was so much after an hour of 1,000 nodes, with
those that had died and with what does not grow. It was 16,000 after four minutes of 100,000."""
VECTORS = 3
"""A node has so many vectors of `sim.dimensions`: weights, momentum, and the copy for their spread."""
PARCEL_BYTES = 500
"""A parcel under way takes so many bytes."""

_Progress = Callable[[float, float], None]
"""A function that is told how much is done, and of how much."""


@dataclass(frozen=True, slots=True)
class CrowdSize:
    """One crowd that was simulated."""

    figures: CrowdFigures
    moments: tuple[CrowdMoment, ...]
    cpu_seconds: float
    peak_mib: float
    """MiB of the process so far."""


def check_memory(settings: CrowdSettings, available: int) -> None:
    """UserError (CONFIG) where the largest size would take more than so many bytes."""
    weights, parcels = VECTORS * 4 * settings.dimensions, PARCEL_BYTES * settings.work.in_flight
    needed = (NODE_BYTES + weights + parcels) * most_nodes(settings, max(settings.nodes))
    if needed > available:
        named = {"sim.nodes": NODE_BYTES, "sim.dimensions": weights, "sim.work.in_flight": parcels}
        most = max(named, key=lambda name: named[name])
        raise UserError(
            ExitCode.CONFIG,
            f"sim.nodes ({max(settings.nodes)}) would take some {needed >> 20} MiB, most of it for {most}, and "
            f"{available >> 20} MiB are free",
            f"simulate fewer{'' if most == 'sim.nodes' else f', lower {most}'}, or on another machine",
        )


def simulate_sizes(settings: CrowdSettings, progress: _Progress) -> Iterator[CrowdSize]:
    """All sizes, one after the other. Raises UserError (CONFIG) as `check_memory`."""
    check_memory(settings, free_memory("cpu").host)
    whole, before = sum(settings.nodes), 0
    for many in settings.nodes:

        def told(share: float, many: int = many, before: int = before) -> None:
            progress(before + share * many, whole)

        with collector.paused():
            size = _simulated(settings, many, told)
        yield size
        before += many


def _simulated(settings: CrowdSettings, many: int, told: Callable[[float], None]) -> CrowdSize:
    began = time.process_time()
    course = CrowdRun(Crowd(settings, many))
    figures = course.run(told=told)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return CrowdSize(figures, tuple(course.crowd.moments), time.process_time() - began, peak)
