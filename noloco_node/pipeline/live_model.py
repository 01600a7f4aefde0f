"""A model that lies in pieces on the nodes of a run: an onlooker asks it stage by stage for the next token.

There is no cache of keys and values: for each token the whole text so far goes through all stages anew, on a random
route. A peer that dies, is silent or refuses is replaced by another of its stage.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import Directory, PeerState
from noloco_node.errors import SHOWN, ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.cut import build_config, cut_width
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.pipeline.inference import FORWARD, ForwardHeader, window_specs
from noloco_node.tallies import PeerTimes
from noloco_node.transport.calls import ask
from noloco_node.transport.errors import (
    DeadlinePassed,
    PeerUnreachable,
    ProtocolViolation,
    Refusal,
    Refused,
    TransportError,
)
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import TensorSpec

ANSWERING = (PeerState.TRAINING, PeerState.FINISHING)
LOOK_SECONDS = 15.0
"""Seconds between two readings of the directory, while all is well."""
PAUSE_SECONDS = (0.25, 1.0)
"""Seconds of pause, least and most, after a round in which every replica of a stage said no."""
NOBODY_SECONDS = 30.0
"""The text ends after so many seconds if the directory shows nobody at the stage at all."""
WORTH_SAYING_SECONDS = 5.0
FOR_GOOD = frozenset(
    {Refusal.UNKNOWN_METHOD, Refusal.NOT_ADMITTED, Refusal.WRONG_PROTOCOL, Refusal.WRONG_RUN, Refusal.BANNED}
)
"""These refusals do not change by waiting."""
WORDS = {
    PeerUnreachable: "cannot be reached",
    DeadlinePassed: "is silent",
    ProtocolViolation: "answers what was not asked for",
}
"""A short text for a person: what p2pd says of a failed call has several lines."""


class LiveModel:
    """Asks the nodes that `directory` shows. `say` hears why it waits."""

    def __init__(
        self,
        spec: RunSpec,
        transport: Transport,
        directory: Directory,
        say: Callable[[str], None],
        *,
        rng: random.Random | None = None,
        pause: tuple[float, float] = PAUSE_SECONDS,
        patience: float = 120.0,
    ) -> None:
        config = build_config(spec.model)
        self._spec = spec
        self._width = cut_width(spec.model, config)
        self._vocabulary: int = config.vocab_size
        self._transport = transport
        self._directory = directory
        self._say = say
        self._rng = rng or ambient.chance()
        self._pause = pause
        self._patience = patience
        self._looked = -math.inf
        self._silent = PeerTimes[PeerId]()
        self.replaced = 0
        """Peers that were asked for their part of a token and did not give it, full ones not counted."""

    @property
    def longest(self) -> int:
        """Tokens that the text so far may have."""
        return self._spec.data.sequence_length

    async def next_logits(self, ids: Sequence[int]) -> Tensor:
        """What comes after these tokens: fp32 [vocabulary]. Raises UserError (NO_STATE_SOURCE) where a stage gives
        nothing."""
        given = torch.tensor([list(ids)], dtype=torch.int32)
        window = given
        if ambient.monotonic() - self._looked > LOOK_SECONDS:
            await self._look()
        for stage in range(self._spec.stages):
            window = await self._through(stage, window, given)
        return window[0]

    async def _through(self, stage: int, window: Tensor, ids: Tensor) -> Tensor:
        began, told = ambient.monotonic(), False
        reasons: dict[PeerId, Refused | TransportError] = {}
        asked: set[PeerId] = set()
        while True:
            peer = self._choose(stage, asked)
            if peer is not None:
                asked.add(peer)
                try:
                    return await self._ask(peer, stage, window, ids)
                except (Refused, TransportError) as error:
                    reasons[peer] = error
                    self._note(peer, error)
                continue
            waited = ambient.monotonic() - began
            patience = self._patience if reasons else min(self._patience, NOBODY_SECONDS)
            if waited >= patience or (reasons and all(map(_for_good, reasons.values()))):
                raise self._nobody(stage, reasons)
            if waited >= WORTH_SAYING_SECONDS and not told:
                told = True
                self._say(f"stage {stage} gives nothing now: {_shown(reasons)}; waiting")
            await asyncio.sleep(self._rng.uniform(*self._pause))
            await self._look()
            asked.clear()

    async def _ask(self, peer: PeerId, stage: int, window: Tensor, ids: Tensor) -> Tensor:
        last, pipeline = stage + 1 == self._spec.stages, self._spec.pipeline
        logits = TensorSpec("fp32", (1, self._vocabulary))
        activations, *beside = window_specs(self._spec, False, ids.shape[1], self._width)
        answer = await ask(
            self._transport,
            peer,
            FORWARD,
            ForwardHeader(run=self._spec.run_id, stage=stage),
            tensors=(window, ids) if beside and stage else (window,),
            specs=(logits if last else activations,),
            seconds=min(pipeline.budget_seconds, 2.0 * pipeline.progress_seconds),
            progress=pipeline.progress_seconds,
        )
        return answer.tensors[0]

    def _choose(self, stage: int, asked: set[PeerId]) -> PeerId | None:
        now, view = ambient.monotonic(), self._directory.view
        records = [record for record in view.live(stage, self._directory.now()) if record.state in ANSWERING]
        there = [PeerId(record.peer_id) for record in records]
        heard = [peer for peer in there if not self._silent.holds(peer, now)]
        left = [peer for peer in heard or there if peer not in asked]
        return self._rng.choice(left) if left else None

    def _note(self, peer: PeerId, error: Refused | TransportError) -> None:
        if isinstance(error, Refused) and error.reason is Refusal.BUSY:
            return
        self.replaced += 1
        if isinstance(error, TransportError):
            # Before that it is asked again only if nobody else is there; full peers beside it do not change that.
            self._silent[peer] = ambient.monotonic() + ANSWER_SECONDS

    async def _look(self) -> None:
        await self._directory.refresh()
        self._looked = ambient.monotonic()

    def _nobody(self, stage: int, reasons: dict[PeerId, Refused | TransportError]) -> UserError:
        return UserError(
            ExitCode.NO_STATE_SOURCE,
            f"no replica of stage {stage} of run '{self._spec.name}' runs its part of the text: {_shown(reasons)}",
            "try again later; or take the weights home with noloco-node export, and generate from there",
        )


def _for_good(error: Refused | TransportError) -> bool:
    return isinstance(error, Refused) and error.reason in FOR_GOOD


def _shown(reasons: dict[PeerId, Refused | TransportError]) -> str:
    if not reasons:
        return "the directory shows none"
    words = [f"…{peer[-6:]} {_word(error)}" for peer, error in list(reasons.items())[:SHOWN]]
    return ", ".join(words + (["and others"] if len(reasons) > SHOWN else []))


def _word(error: Refused | TransportError) -> str:
    if isinstance(error, Refused):
        return f"says {error}"
    for kind, word in WORDS.items():
        if isinstance(error, kind):
            return word
    return "hung up"
