"""The nodes of a crowd, what happens when, and what is sent between them."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
import struct
from array import array
from collections.abc import Callable

import numpy as np

from noloco_node.config.crowd_spec import CrowdSettings
from noloco_node.directory.buckets import MOST_LEVEL, Flags, Ints, prefix_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.windows import new_stream_seconds

PROGRESS_SECONDS = 15.0
"""A stream that moves no byte for so many seconds is given up (`pipeline.progress_seconds`)."""
EXCHANGE_SHARE = 0.5
"""A weight exchange takes this share of a link, beside microbatches."""
IN_TURN = 4 / 3
"""The time of one side's processor until both have committed, in times of all that an exchange takes there. Before the
commit one side works while the other waits."""
CHUNK_BYTES = 1 << 20
"""The bytes of a chunk, as `limits.chunk_bytes`."""
MOMENT_SECONDS = 0.25
"""Events within so many seconds are kept in order; see `Agenda`."""

_Entry = tuple[float, int, Callable[..., None], tuple[object, ...]]
"""An entry: its time, a number to tell entries of one time apart, a function, and its arguments."""


class Agenda:
    """Events by their time. Of two at one time the one entered first goes first.

    Only what is due within the same moment is kept in order; the rest lies by moments until then. A heap of hundreds of
    thousands would be gone through, far apart in memory, for each thing that is entered or taken out.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._number = itertools.count()
        self._moment = 0
        self._soon: list[_Entry] = []
        """A heap of what is due within the moment."""
        self._later: dict[int, list[_Entry]] = {}
        """What is due at later ones, in no order."""
        self._moments: list[int] = []
        """A heap of these."""

    def after(self, seconds: float, happens: Callable[..., None], *what: object) -> None:
        """Let it happen so many seconds from now."""
        at = self.now + seconds
        entry, moment = (at, next(self._number), happens, what), int(at / MOMENT_SECONDS)
        if moment <= self._moment:
            heapq.heappush(self._soon, entry)
        elif moment in self._later:
            self._later[moment].append(entry)
        else:
            self._later[moment] = [entry]
            heapq.heappush(self._moments, moment)

    def run(self, until: float) -> None:
        """Let all happen that is due by then."""
        pop = heapq.heappop
        while self._soon or (self._moments and self._moments[0] * MOMENT_SECONDS <= until):
            if not self._soon:
                self._moment = pop(self._moments)
                self._soon = sorted(self._later.pop(self._moment))
            soon = self._soon
            while soon and soon[0][0] <= until:
                self.now, _, happens, what = pop(soon)
                self.happened += 1
                happens(*what)
            if soon:
                break
        self.now = until


class Pairs:
    """The pairs that came together, in eight bytes each."""

    def __init__(self) -> None:
        self._numbers = array("i")

    def __len__(self) -> int:
        return len(self._numbers) // 2

    def append(self, i: int, j: int) -> None:
        """They came together."""
        self._numbers.append(i)
        self._numbers.append(j)

    def clear(self) -> None:
        """Forget all."""
        self._numbers = array("i")

    @property
    def rows(self) -> Ints:
        """All so far, one after the other."""
        return np.array(self._numbers, np.int64).reshape(-1, 2)


def peer_of(number: int) -> PeerId:
    """The id of a node."""
    return PeerId(f"{number:07d}")


class Nodes:
    """The nodes. Numbers are given in the order in which they come and never again."""

    def __init__(self, settings: CrowdSettings, most: int, rng: random.Random, agenda: Agenda) -> None:
        self.settings = settings
        self.agenda = agenda
        self.rng = rng
        self.most = most
        self._near, self._far = 0.5 * settings.links.near_seconds, 0.5 * settings.links.far_seconds
        self.peer: list[PeerId] = []
        self.stage: list[int] = []
        self.speed: list[float] = []
        self.region: list[int] = []
        self.up: list[float] = []
        """Bytes a second."""
        self.down: list[float] = []
        self.up_free: list[float] = []
        """When the last of what was sent is gone."""
        self.down_free: list[float] = []
        self.works_until: list[float] = []
        """When each device ends what it works on."""
        self.exchanging = bytearray(most)
        self.alive = bytearray(most)
        self.serving = bytearray(most)
        """It lives and has the state of its stage."""
        self.alive_row: Flags = np.frombuffer(self.alive, np.bool_)
        """The memory of `alive` as an array; `serving_row` is that of `serving`."""
        self.serving_row: Flags = np.frombuffer(self.serving, np.bool_)
        self.born: list[float] = []
        self.died: list[float] = []
        self.apart: int | None = None
        """The region that is cut off."""
        self.prefix = np.zeros(most, np.int64)
        self.stage_row = np.zeros(most, np.int64)
        """The stages as an array, beside `stage`: `move` changes both."""
        self.speed_row = np.zeros(most)
        self.region_row = np.zeros(most, np.int64)
        self.expires = np.zeros((MOST_LEVEL + 1, most))
        """Ends of the lives of their records, by level."""
        self.many = 0
        """That live."""
        self.sent: dict[str, float] = {}
        """Bytes by kind."""
        self.chunk_octets: float = CHUNK_BYTES
        """The bytes of a chunk of an exchange."""
        self._trace = hashlib.sha256()

    def __len__(self) -> int:
        return len(self.peer)

    def add(self, stage: int, *, serving: bool) -> int:
        """One more. Returns its number."""
        i, rng, links = len(self.peer), self.rng, self.settings.links
        self.peer.append(peer_of(i))
        self.stage.append(stage)
        self.speed.append(self.settings.devices.fastest ** rng.random())
        self.region.append(rng.randrange(links.regions))
        self.up.append(125_000.0 * links.up_mbit * math.exp(rng.gauss(0.0, links.sigma)))
        self.down.append(125_000.0 * links.down_mbit * math.exp(rng.gauss(0.0, links.sigma)))
        self.up_free.append(0.0)
        self.down_free.append(0.0)
        self.works_until.append(0.0)
        self.alive[i], self.serving[i] = True, serving
        self.born.append(self.agenda.now)
        self.died.append(math.inf)
        self.prefix[i], self.stage_row[i] = prefix_of(self.peer[i]), stage
        self.speed_row[i], self.region_row[i] = self.speed[i], self.region[i]
        self.many += 1
        self.tell("joined", i, stage)
        return i

    def move(self, i: int, stage: int) -> None:
        """It is of another stage from now on."""
        self.stage[i] = self.stage_row[i] = stage

    def kill(self, i: int) -> None:
        """It is gone; its records live on until they expire."""
        self.alive[i] = self.serving[i] = False
        self.died[i] = self.agenda.now
        self.many -= 1
        self.tell("died", i)

    def living(self) -> list[int]:
        """All that live."""
        found: list[int] = np.flatnonzero(self.alive_row).tolist()
        return found

    def reach(self, i: int, j: int) -> bool:
        """Whether anything gets from one to the other now."""
        if self.apart is None or not self.alive[j]:
            return self.alive[j] == 1
        return (self.region[i] == self.apart) == (self.region[j] == self.apart)

    def latency(self, i: int, j: int) -> float:
        """Seconds one way."""
        return self._near if self.region[i] == self.region[j] else self._far

    def carry(self, i: int, j: int, octets: float, times: float) -> float:
        """Seconds until so many bytes have come from one to the other. On either link one thing goes after the other,
        and an exchange beside takes its part. A downlink is taken for as long as the bytes need on it, not for as long
        as a slow uplink needs for them. All takes so many `times` as long; the sender counts the bytes."""
        now, sent, taken = self.agenda.now, self.up_free[i], self.down_free[j]
        up = self.up[i] * (EXCHANGE_SHARE if self.exchanging[i] else 1.0)
        down = self.down[j] * (EXCHANGE_SHARE if self.exchanging[j] else 1.0)
        self.up_free[i] = sent = (sent if sent > now else now) + times * octets / up
        self.down_free[j] = taken = (taken if taken > now else now) + times * octets / down
        return (sent if sent > taken else taken) - now + times * self.latency(i, j)

    def turn(self, i: int) -> float:
        """Seconds until a device comes to what goes before all else: a snapshot of the weights, or a change of them. It
        ends what it works on first; of a parcel that is one microbatch."""
        return max(0.0, self.works_until[i] - self.agenda.now) / self.settings.parcel

    def exchange_seconds(self, i: int, j: int, octets: float) -> float:
        """Seconds for both to have what the other sends and to have worked it out, beside microbatches. The first chunk
        goes there before the other's comes back, those after it go side by side."""
        there, back = self._transfer_seconds(i, j, octets), self._transfer_seconds(j, i, octets)
        first, worked_out = min(1.0, self.chunk_octets / octets), IN_TURN * self.settings.work.exchange_seconds
        return first * (there + back) + (1.0 - first) * max(there, back) + 4.0 * self.latency(i, j) + worked_out

    def _transfer_seconds(self, i: int, j: int, octets: float) -> float:
        """Seconds of a transfer on a new stream that has all of both links. While something else is on its way there,
        it has half of them."""
        rate = min(self.up[i], self.down[j])
        busy = max(0.0, self.up_free[i] - self.agenda.now, self.down_free[j] - self.agenda.now)
        return new_stream_seconds(octets, rate, 2.0 * self.latency(i, j)) + min(octets / rate, busy)

    def copy_seconds(self, i: int, j: int, octets: float) -> float:
        """Seconds for one to have a state of the other's, beside microbatches and exchanges."""
        slowest = EXCHANGE_SHARE * min(self.up[i], self.up[j], self.down[i], self.down[j])
        return octets / slowest + 4.0 * self.latency(i, j)

    def count(self, kind: str, octets: float) -> None:
        """So many bytes were sent."""
        self.sent[kind] = self.sent.get(kind, 0.0) + octets

    def tell(self, what: str, *numbers: float) -> None:
        """Into the trace."""
        self._trace.update(what.encode() + struct.pack(f"<{1 + len(numbers)}d", self.agenda.now, *numbers))

    @property
    def trace(self) -> str:
        """Hash of what was told."""
        return self._trace.hexdigest()
