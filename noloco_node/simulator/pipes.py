"""Capacity that transfers share: each has an equal part of every pipe that it goes through, the least part counts."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from dataclasses import dataclass, field

SMALL_OCTETS = 16_384
"""A message of no more bytes takes its time at full rate and slows nobody down: a request without tensors among
transfers."""


@dataclass(eq=False)
class Pipe:
    """One direction of a node's link. `capacity` is in bytes a second."""

    capacity: float
    flows: dict[_Flow, None] = field(default_factory=dict["_Flow", None], repr=False)


@dataclass(eq=False)
class _Flow:
    pipes: tuple[Pipe, ...]
    most: float
    left: float
    done: asyncio.Future[None]
    rate: float = 0.0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Pipes:
    """Carries bytes through pipes on the running loop.

    What a transfer with a narrower other pipe does not use is not given to others: TCP does a little better.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        """Neither end's: a machine that is halted must not hold others' transfers up."""

    async def carry(self, octets: float, *pipes: Pipe, most: float = float("inf")) -> None:
        """Return when so many bytes went through all the `pipes`, at `most` bytes a second."""
        if octets <= SMALL_OCTETS:
            await asyncio.sleep(octets / min(most, *(pipe.capacity for pipe in pipes)))
            return
        flow = _Flow(pipes, most, octets, self._loop.create_future(), since=self._loop.time())
        for pipe in pipes:
            pipe.flows[flow] = None
        self._share(pipes)
        try:
            await flow.done
        finally:
            if flow.timer is not None:
                flow.timer.cancel()
            for pipe in pipes:
                pipe.flows.pop(flow, None)
            self._share(pipes)

    def resize(self, pipe: Pipe, capacity: float) -> None:
        """Change a pipe's capacity, also for what is under way."""
        pipe.capacity = capacity
        self._share((pipe,))

    def _share(self, pipes: tuple[Pipe, ...]) -> None:
        """Give each transfer that goes through one of these its rate anew."""
        now = self._loop.time()
        for flow in {flow: None for pipe in pipes for flow in pipe.flows}:
            rate = min(flow.most, *(pipe.capacity / len(pipe.flows) for pipe in flow.pipes))
            if rate == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            if flow.timer is not None:
                flow.timer.cancel()
            flow.timer = self._loop.call_later(flow.left / rate, _arrive, flow, context=self._context)


def _arrive(flow: _Flow) -> None:
    if not flow.done.done():
        flow.done.set_result(None)
