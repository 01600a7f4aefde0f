"""Audits: now and then several peers train the same microbatch, and who contradicts the others gets no more of them.

Beside them all answers of a peer are judged together, without copies (`Leanings`): a lie may be small in each of them.

A gradient with its sign turned looks like any other in size, and gradients of different microbatches have too little in
common to tell one by (decision 12). Those of the same microbatch nearly agree between honest replicas of a stage. What
an audited peer gets is an ordinary microbatch: it cannot know that another one has it too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, TypeVar

from torch import Tensor

from noloco_node import ambient
from noloco_node.finite import ALIKE, INLINE_ELEMENTS, products
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import HANG_SECONDS, TRIAL_SECONDS, Trust
from noloco_node.pipeline.messages import NO_FAILURE, Outgoing, Trained
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.training.bounds import Leanings, NormBound
from noloco_node.transport.errors import Refused, TransportError

logger = logging.getLogger(__name__)

T = TypeVar("T")

JURY = 3
"""Peers without which no contradiction can be decided, so that none is looked for."""
PATIENCE = 4.0
"""Times what the first answer took, and a second, that a juror has: one that stalls must not hold the audits up."""


def share_of_a_hop(share: float, hops: int) -> float:
    """The share that the sender of each of so many hops may have trained twice. Nothing tells a copy from the first, so
    copies are copied again further down: at the last stage all of them together come to `share` of the work."""
    return (1.0 + share) ** (1.0 / hops) - 1.0


class Finding(StrEnum):
    """How an audit ended, or what was found without one."""

    AGREED = "agreed"
    CONTRADICTED = "contradicted"
    """One of three was alone with its gradient."""
    UNDECIDED = "undecided"
    """Two contradicted each other, and the third agreed with both or with none."""
    FAILED = "failed"
    """Too few peers answered."""
    LEANT = "leant"
    """No audit: what a peer's answers did to this node's weights, all together, leans one way."""


def likeness(one: Tensor, other: Tensor) -> float:
    """2⟨a, b⟩ / (‖a‖² + ‖b‖²) of two tensors of the same shape: 1 where they are equal, -1 where one is the other with
    its sign turned; also small where one is much larger than the other."""
    product, *squares = products(one, other)
    return 2.0 * product / sum(squares) if any(squares) else 1.0


def odd_one_out(first: Tensor, second: Tensor, third: Tensor) -> int | None:
    """Which of two that contradict each other is unlike a third; None where that is both of them or neither."""
    with_first, with_second = _are_alike(first, third), _are_alike(second, third)
    return None if with_first == with_second else int(with_first)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A microbatch, its first answer, and the seconds that this one had and took."""

    first: Trained
    outgoing: Outgoing
    budget: float
    took: float


class Auditor:
    """Audits a node's next-stage peers, one microbatch at a time, beside the training.

    Of a jury at most one is doubted, and two others decide: doubted peers neither clear nor outvote anybody.
    """

    def __init__(
        self,
        share: float,
        balancer: LoadBalancer,
        train_again: Callable[[PeerId, Outgoing, float], Awaitable[Trained]],
        rng: random.Random,
        clock: Callable[[], float] = ambient.monotonic,
        *,
        allowance: float = JURY,
    ) -> None:
        """`share`: copies for each microbatch, all audits together but those that a doubt calls for; `allowance`: how
        many there may be at once to begin with. `train_again` has a peer train a microbatch again, under another id,
        with the budget (seconds) that the first had: nothing must tell the two apart. Refused, TransportError."""
        self._share = share
        self._balancer = balancer
        self.train_again = train_again
        self._rng = rng
        self._clock = clock
        self._cases: asyncio.Queue[_Case] = asyncio.Queue()
        self._at_work = False
        self._credit, self._most_credit = allowance, max(allowance, float(JURY))
        """Copies that may be asked for now without a doubt."""
        self._norms = NormBound(2.0)
        self._leanings = Leanings()
        self.findings: Counter[str] = Counter()
        """So far, by `Finding`."""

    def consider(self, first: Trained, outgoing: Outgoing, *, budget: float, took: float) -> None:
        """Audit a microbatch that a peer has answered, where no other is being audited, and the stage has enough
        replicas to decide: all of a doubted peer and any while one is on trial and to be heard; and as far as the share
        goes the first of each peer, one whose gradient is unusually large, and others at random. `budget` and `took`:
        the seconds that the answer had and needed."""
        peer = PeerId(first.peer)
        self._credit = min(self._most_credit, self._credit + self._share)
        unusual = self._norms.factor(peer, first.scale) < 1.0
        if self._share == 0.0 or self._at_work or self._balancer.trust(peer) is Trust.SET_ASIDE:
            return
        doubted, suspects = self._balancer.doubted, self._to_be_heard()
        spotless = len(self._balancer.peers) - len(doubted)
        if spotless + (peer in doubted or bool(suspects)) < JURY:
            return
        if peer in doubted or suspects:
            self._take_up(_Case(first, outgoing, budget, took))
        elif self._credit >= 1.0 and (unusual or self._balancer.repute(peer).audits == 0 or self._is_drawn()):
            self._credit -= 1.0
            self._take_up(_Case(first, outgoing, budget, took))

    def compare(self, peer: PeerId, signs: Tensor) -> None:
        """Compare what an answer of `peer` did to this node's weights, by `signs` of its gradients, with what others'
        do. Not while it is set aside: what it still had in hand is no new lie."""
        if self._balancer.trust(peer) is not Trust.SET_ASIDE and self._leanings.leans(peer, signs):
            self.findings[Finding.LEANT.value] += 1
            self._balancer.leant(peer)

    def _is_drawn(self) -> bool:
        """Twice as often as the share allows: it is the credit that holds it down, and hardly any is left unused."""
        return self._rng.random() < 2.0 * self._share

    def _take_up(self, case: _Case) -> None:
        self._at_work = True
        self._cases.put_nowait(case)

    async def run(self) -> NoReturn:
        """Work off what `consider` has taken up, until cancelled."""
        while True:
            case = await self._cases.get()
            try:
                finding = await self._audit(case)
            except Exception:
                logger.exception("an audit failed")  # it only looks on: the training must not end with it
                finding = Finding.FAILED
            finally:
                self._at_work = False
            self.findings[finding.value] += 1

    async def _audit(self, case: _Case) -> Finding:
        assert case.first.gradient is not None
        answers = {PeerId(case.first.peer): case.first.gradient}
        failed: set[PeerId] = set()
        while len(answers) < JURY and len(failed) <= JURY:
            peer = self._next_juror({*answers, *failed})
            if peer is None:
                break
            if len(answers) > 1:
                self._credit = max(-float(JURY), self._credit - 1.0)
            gradient = await self._ask(peer, case)
            if gradient is None:
                failed.add(peer)
                continue
            answers[peer] = gradient
            if len(answers) == 2 and await _off_loop(_are_alike, *answers.values()):
                self._note(dict.fromkeys(answers, False))
                return Finding.AGREED
        if len(answers) < JURY:
            return Finding.FAILED
        odd = await _off_loop(odd_one_out, *answers.values())
        self._note({peer: None if odd is None else index == odd for index, peer in enumerate(answers)})
        return Finding.UNDECIDED if odd is None else Finding.CONTRADICTED

    def _note(self, against: Mapping[PeerId, bool | None]) -> None:
        for index, (peer, verdict) in enumerate(against.items()):
            self._balancer.audited(peer, against=verdict, by_copy=index > 0)
            if self._balancer.trust(peer) is Trust.SET_ASIDE:
                self._leanings.forget(peer)

    async def _ask(self, peer: PeerId, case: _Case) -> Tensor | None:
        """A juror's gradient; None where it gives none in time."""
        silent = TRIAL_SECONDS
        try:
            async with asyncio.timeout(PATIENCE * case.took + 1.0):
                return (await self.train_again(peer, case.outgoing, case.budget)).gradient
        except Refused as refusal:
            why = str(refusal)
            silent = HANG_SECONDS if refusal.reason in NO_FAILURE else TRIAL_SECONDS
        except (TransportError, TimeoutError) as error:
            why = repr(error)
        logger.debug("%s gave no answer to an audit: %s", peer, why)
        self._balancer.cards.hop(peer).no_audit_until = self._clock() + silent
        return None

    def _next_juror(self, asked: Collection[PeerId]) -> PeerId | None:
        """At most one that is doubted, before the others."""
        doubted = self._balancer.doubted
        if doubted.isdisjoint(asked) and (suspects := self._to_be_heard()):
            return self._rng.choice(suspects)
        return self._balancer.choose({*asked, *doubted})

    def _to_be_heard(self) -> list[PeerId]:
        """Peers on trial that are worth asking now."""
        now, balancer = self._clock(), self._balancer
        willing = (peer for peer in balancer.doubted if now >= balancer.cards.hop(peer).no_audit_until)
        return sorted(peer for peer in willing if balancer.trust(peer) is Trust.ON_TRIAL)


async def _off_loop(compare: Callable[..., T], *gradients: Tensor) -> T:
    """Compare large gradients beside the event loop, small ones at once."""
    if gradients[0].numel() <= INLINE_ELEMENTS:
        return compare(*gradients)
    return await ambient.elsewhere(compare, *gradients)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Two gradients less alike contradict each other (decision 12 has what was measured)."""
    return likeness(one, other) >= ALIKE
