"""Pure decisions about the outer step: when to average, and with which stage peer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import Refusal


@dataclass(frozen=True, slots=True)
class Window:
    """The dialling window in inner steps since the last committed snapshot.

    From `min_inner_steps` (H_min) a replica may be dialled. From `inner_steps` (H) it dials. Only after H + 2·H_min
    does it step alone. Giving up after a few tries would leave a fifth of the steps alone; the window leaves next to
    none, even if speeds differ eightfold.
    """

    inner_steps: int
    min_inner_steps: int

    @property
    def alone_after(self) -> int:
        """Inner steps after which a replica that found nobody steps alone."""
        return self.inner_steps + self.search_steps

    @property
    def search_steps(self) -> int:
        """Inner steps that a replica spends looking for a partner before it steps alone, at least two."""
        return 2 * max(1, self.min_inner_steps)


class PairingState(NamedTuple):
    """What the decision to dial rests on."""

    steps_since_outer: int
    """Inner steps since the last committed snapshot."""
    steps_free: int
    """Inner steps since this replica was last engaged: a long exchange must not use up the time to find the next."""
    stage_peers: Callable[[], Sequence[PeerId]]
    """Live stage peers that may be averaged with. Asked only once a step is due: it takes all records to say, and the
    decision is taken at every pulse."""
    engaged: bool
    """An exchange is open, here or dialled from elsewhere."""
    next_try: float
    """Time before which no new dial is made, after a refusal."""
    last_round: bool = False
    """Training is over: dial whatever the count, and never step alone while stage peers live."""
    behind: bool = False
    """The replica is far behind its stage peers. It dials whatever the count, since any peer that answers gives it its
    state."""
    last_done: bool = False
    """The last outer step has been taken: others may still dial, this replica does not."""
    weigh: Callable[[Sequence[PeerId]], Sequence[float]] | None = None
    """How often to dial each of the stage peers, in their order; None: all alike."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Propose an exchange to this stage peer."""

    partner: PeerId


class StepAlone:
    """Take the outer step without a partner."""


def decide(state: PairingState, window: Window, *, now: float, rng: random.Random) -> Dial | StepAlone | None:
    """Dial a random stage peer, step alone, or wait (None)."""
    due = state.steps_since_outer >= window.inner_steps or state.last_round
    if state.engaged or state.last_done or not (due or state.behind):
        return None
    stage_peers = state.stage_peers()
    if not stage_peers:
        return StepAlone() if due else None
    searched_enough = state.steps_free >= window.search_steps
    if state.steps_since_outer >= window.alone_after and searched_enough and not state.last_round:
        return StepAlone()
    if now < state.next_try:
        return None
    return Dial(_draw(stage_peers, state.weigh, rng))


def _draw(
    stage_peers: Sequence[PeerId], weigh: Callable[[Sequence[PeerId]], Sequence[float]] | None, rng: random.Random
) -> PeerId:
    weights = weigh(stage_peers) if weigh is not None else ()
    if len(set(weights)) <= 1:
        return rng.choice(stage_peers)
    return rng.choices(stage_peers, weights)[0]


def retry_delay(step_seconds: float, rng: random.Random) -> float:
    """Seconds until the next dial after a refusal: a jittered part of an inner step, within [0.02, 5]."""
    return min(5.0, max(0.02, step_seconds * rng.uniform(0.05, 0.3)))


def answer_proposal(
    *,
    own: PeerId,
    dialler: PeerId,
    dialling: PeerId | None,
    too_often: bool,
    steps_since_outer: int,
    window: Window,
    last_round: bool,
) -> Refusal | None:
    """None to accept a proposal of `dialler`, else the reason to refuse it.

    `too_often`: the dialler has had its part of the outer steps (`Partners.too_many`). `dialling` is the stage peer
    that this replica has proposed to. If two dial each other, the proposal of the smaller id stands and the other is
    refused as crossed.
    """
    if too_often:
        return Refusal.TOO_EARLY
    if dialling is not None:
        if dialling != dialler:
            return Refusal.BUSY
        return None if dialler < own else Refusal.CROSSED
    if steps_since_outer < window.min_inner_steps and not last_round:
        return Refusal.TOO_EARLY
    return None
