"""Audits: now and then several peers train the same microbatch, and who contradicts the others gets no more of them.

A gradient with its sign turned looks like any other in size, and gradients of different microbatches have too little in
common to tell one by (decision 127). Those of the same microbatch nearly agree between honest replicas of a stage. What
an audited peer gets is an ordinary microbatch: it cannot know that another one has it too.

Who was contradicted once is on trial: what it says is only compared, until audits have cleared it or set it aside.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from noloco_node.swarm.conduct import PEERS_REMEMBERED, ban_seconds
from noloco_node.swarm.microbatch import INLINE_ELEMENTS, Trained
from noloco_node.swarm.routing import RoutingBook
from noloco_node.swarm.transport import PeerId, Refused, TransportError
from noloco_node.training.norm_bound import NormBound

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALIKE = 0.5
"""Two gradients less alike than this contradict each other (decision 128 has what was measured)."""
CONTRADICTED = 3
"""Times that a peer must have contradicted the others more often than it agreed with them to be set aside."""
TRIAL_SECONDS = 60.0
"""How long a peer that was contradicted gets no ordinary microbatch, if no audit clears it before."""
UNUSUAL = 2.0
"""Times the usual norm from which a gradient is looked at."""
JURY = 3
"""Peers without which no contradiction can be decided, so that none is looked for."""


class Finding(StrEnum):
    """How an audit ended."""

    AGREED = "agreed"
    CONTRADICTED = "contradicted"
    """One of three was alone with its gradient."""
    UNDECIDED = "undecided"
    """Two contradicted each other, and no third agreed with one of them."""
    FAILED = "failed"
    """A peer was busy, left, or broke off."""


@dataclass(frozen=True, slots=True)
class Repute:
    """What audits have said of one peer. Times are seconds on a clock that never goes back."""

    audits: int = 0
    contradictions: int = 0
    """One more for each audit that was decided against it, one less (0 at least) for each other."""
    set_asides: int = 0
    aside_until: float = 0.0

    def on_trial(self, now: float) -> bool:
        """Whether its word is doubted: it gets microbatches only to compare its answers with others'."""
        return self.contradictions > 0 and now >= self.aside_until


def after_audit(repute: Repute, against: bool | None, now: float) -> Repute:
    """The peer's repute after one more audit, decided against it, for it, or not at all (None); set aside with the
    contradiction that makes `CONTRADICTED`.

    It comes back one contradiction short of that, so a liar is set aside again at once, and for twice as long.
    """
    audits = repute.audits + 1
    if against is None:
        return replace(repute, audits=audits)
    if not against:
        return replace(repute, audits=audits, contradictions=max(0, repute.contradictions - 1))
    if now < repute.aside_until or repute.contradictions + 1 < CONTRADICTED:
        contradictions = min(repute.contradictions + 1, CONTRADICTED - 1)
        return replace(repute, audits=audits, contradictions=contradictions)
    seconds, set_asides = ban_seconds(repute.set_asides, repute.aside_until, now)
    return Repute(audits, CONTRADICTED - 1, set_asides, now + seconds)


def likeness(one: Tensor, other: Tensor) -> float:
    """2⟨a, b⟩ / (‖a‖² + ‖b‖²) of two tensors of the same shape: 1 where they are equal, -1 where one is the other with
    its sign turned; also small where one is much larger than the other."""
    a, b = one.to(torch.float32).flatten(), other.to(torch.float32).flatten()
    largest = float(torch.maximum(a.abs().max(), b.abs().max()))
    if largest == 0.0:
        return 1.0
    a, b = a / largest, b / largest
    return float(2.0 * torch.dot(a, b) / (torch.dot(a, a) + torch.dot(b, b)))


def odd_one_out(*gradients: Tensor) -> int | None:
    """Which of three is unlike both others, who are alike; None where that is none of them."""
    alike = [pair for pair in combinations(range(JURY), 2) if _are_alike(gradients[pair[0]], gradients[pair[1]])]
    return ({*range(JURY)} - {*alike[0]}).pop() if len(alike) == 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A microbatch and its first answer."""

    first: Trained
    activations: Tensor
    labels: Tensor


class Auditor:
    """Audits a node's next-stage peers, one microbatch at a time, beside the training."""

    def __init__(
        self,
        share: float,
        book: RoutingBook,
        train_again: Callable[[PeerId, Tensor, Tensor], Awaitable[Trained]],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`train_again` has a peer train activations and labels as a microbatch of its own; Refused, TransportError."""
        self._share = share
        self._book = book
        self._train_again = train_again
        self._rng = rng
        self._clock = clock
        self._reputes: OrderedDict[PeerId, Repute] = OrderedDict()
        self._cases: asyncio.Queue[_Case] = asyncio.Queue()
        self._at_work = False
        self._norms = NormBound(UNUSUAL)
        self.findings: Counter[str] = Counter()
        """Audits so far, by `Finding`."""

    def consider(self, first: Trained, activations: Tensor, labels: Tensor) -> None:
        """Audit a microbatch that a peer has answered, where no other is being audited, and the stage has enough
        replicas to decide: the first of each peer, one whose gradient is unusually large, any while a peer is on trial
        and can be heard beside it, and of the others a share."""
        unusual = self._norms.factor(first.peer, first.scale) < 1.0
        if self._share == 0.0 or self._at_work or self._jury < JURY:
            return
        is_new = self._reputes.get(PeerId(first.peer), Repute()).audits == 0
        if unusual or is_new or self._on_trial() or self._rng.random() < self._share:
            self._at_work = True
            self._cases.put_nowait(_Case(first, activations, labels))

    async def run(self) -> NoReturn:
        """Work off what `consider` has taken up, until cancelled."""
        while True:
            case = await self._cases.get()
            try:
                finding = await self._audit(case)
            except (Refused, TransportError) as error:
                logger.debug("an audit came to nothing: %r", error)
                finding = Finding.FAILED
            finally:
                self._at_work = False
            self.findings[finding.value] += 1

    async def _audit(self, case: _Case) -> Finding:
        assert case.first.gradient is not None
        answers = {PeerId(case.first.peer): case.first.gradient}
        while len(answers) < JURY:
            suspects = [peer for peer in self._on_trial() if peer not in answers]
            peer = suspects[0] if suspects else self._book.choose(answers)
            if peer is None:
                break
            again = await self._train_again(peer, case.activations, case.labels)
            assert again.gradient is not None
            answers[peer] = again.gradient
            if len(answers) == 2 and await _off_loop(_are_alike, *answers.values()):
                self._note(dict.fromkeys(answers, False))
                return Finding.AGREED
        if len(answers) == 1:
            return Finding.FAILED
        odd = await _off_loop(odd_one_out, *answers.values()) if len(answers) == JURY else None
        if odd is None:
            self._note(dict.fromkeys(answers))
            return Finding.UNDECIDED
        self._note({peer: index == odd for index, peer in enumerate(answers)})
        return Finding.CONTRADICTED

    @property
    def _jury(self) -> int:
        """Live peers whose word is heard."""
        now = self._clock()
        return sum(self._reputes.get(peer, Repute()).aside_until <= now for peer in self._book.peers)

    def _on_trial(self) -> list[PeerId]:
        """Live peers whose word is doubted, those first that have been heard least."""
        now = self._clock()
        doubted = [peer for peer in self._book.peers if self._reputes.get(peer, Repute()).on_trial(now)]
        return sorted(doubted, key=lambda peer: self._reputes[peer].audits)

    def _note(self, against: Mapping[PeerId, bool | None]) -> None:
        now = self._clock()
        for peer, is_against in against.items():
            before = self._reputes.pop(peer, Repute())
            after = self._reputes[peer] = after_audit(before, is_against, now)
            if len(self._reputes) > PEERS_REMEMBERED:
                self._reputes.popitem(last=False)
            if after.aside_until != before.aside_until:
                logger.warning(
                    "%s gets no microbatch for %.0f s: its gradients contradict those of two others again and again",
                    peer,
                    after.aside_until - now,
                )
            if after.contradictions:
                self._book.set_aside(peer, max(after.aside_until, now + TRIAL_SECONDS))
            elif before.contradictions:
                self._book.set_aside(peer, now)


async def _off_loop(compare: Callable[..., T], *gradients: Tensor) -> T:
    """Compare large gradients beside the event loop, small ones at once."""
    if gradients[0].numel() <= INLINE_ELEMENTS:
        return compare(*gradients)
    return await asyncio.to_thread(compare, *gradients)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return likeness(one, other) >= ALIKE
