"""hivemind's own all-reduce among some peers on this machine, each with a DHT and a p2pd of its own, for
`benchmarks.outer`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Self

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage

STEP_SECONDS = 120.0
MATCHMAKING_SECONDS = 2.0
LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class Averaged:
    """One all-reduce."""

    seconds: float
    """Since all of the group were in it."""
    with_matchmaking: float


class Group:
    """So many peers that average a vector of fp32."""

    def __init__(self, peers: int, parameters: int) -> None:
        self._peers, self._parameters = peers, parameters
        self._dhts: list[Any] = []
        self._averagers: list[Any] = []

    def __enter__(self) -> Self:
        entrance: Any = None
        for number in range(self._peers):
            dht = hivemind.DHT(initial_peers=entrance, start=True)
            self._dhts.append(dht)
            entrance = entrance or [str(address) for address in dht.get_visible_maddrs()]
            averager = DecentralizedAverager(
                [torch.full((self._parameters,), float(number))],
                dht,
                start=True,
                prefix="bench",
                target_group_size=self._peers,
                min_group_size=self._peers,
                min_matchmaking_time=MATCHMAKING_SECONDS,
                request_timeout=MATCHMAKING_SECONDS / 2,
            )
            self._averagers.append(averager)
        return self

    def average(self) -> Averaged | None:
        """Set each peer's vector to its number and average them; None where not all got the mean of all."""
        for number, averager in enumerate(self._averagers):
            with averager.get_tensors() as tensors:
                tensors[0].fill_(float(number))
        began = time.perf_counter()
        controls = [averager.step(wait=False, allow_retries=True, timeout=STEP_SECONDS) for averager in self._averagers]
        formed = began
        while not all(control.done() for control in controls):
            if any(control.stage.value < AveragingStage.RUNNING_ALLREDUCE.value for control in controls):
                formed = time.perf_counter()
            time.sleep(LOOK_SECONDS)
        over = time.perf_counter()
        if any(control.exception() for control in controls) or not all(map(self._has_mean, self._averagers)):
            return None
        return Averaged(over - formed, over - began)

    def _has_mean(self, averager: Any) -> bool:
        with averager.get_tensors() as tensors:
            wanted = torch.full_like(tensors[0], (self._peers - 1) / 2)
            return bool(torch.allclose(tensors[0], wanted, atol=1e-4))

    def __exit__(self, *_error: object) -> None:
        for each in (*self._averagers, *self._dhts):
            each.shutdown()
