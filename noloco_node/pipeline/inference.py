"""Forward only, for a user that generates a text through the swarm: one stage of one window, within a ration.

The user carries the activations from stage to stage itself. Each node works for the peer before it, by its
authenticated id, and for nobody's word. A peer may have a share of the tokens that this node trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.clocks import FarBehind
from noloco_node.finite import found_finite
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.pipeline.admission import Rations
from noloco_node.pipeline.messages import NO_MEMORY
from noloco_node.process_memory import NoMemory
from noloco_node.training.compute_thread import QueueTurn
from noloco_node.training.trainer import MicrobatchNotFinite, StageFacts, carried_dtype
from noloco_node.transport.calls import NOTHING, Method, Nothing, Reply, on_tensors
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release, Transport, Withdraw
from noloco_node.transport.messages import (
    DTYPE_NAMES,
    ProtocolVersion,
    RunName,
    StageIndex,
    TensorSpec,
    WireModel,
    check_addressed,
)

AT_ONCE = 2
"""A node holds at most so many windows, those of all askers together."""
SAVED_WINDOWS = 32
"""All askers together may have so many windows at once, however little was asked before. One of them may have half."""
WEIGHT = 4.0
"""A token counts so much in its turn on the device, beside a token that is trained."""


class ForwardHeader(WireModel):
    """Goes with token ids int32 [1, T] to stage 0, with activations [1, T, width] to a later one, in a subspace with
    both. The answer has the activations for the next stage, or the logits of the last position, fp32 [1, vocabulary].
    """

    run: RunName
    stage: StageIndex
    protocol: ProtocolVersion = PROTOCOL_VERSION


FORWARD = Method("inference.forward", ForwardHeader, Nothing)


class InferenceServer:
    """Answers for this node's stage, unless `node.generate_share` is 0."""

    def __init__(self, context: ReplicaContext, stage: StageFacts, behind: FarBehind) -> None:
        """`behind` says whether this replica is far behind its stage peers."""
        self._spec = spec = context.spec
        self._worker = worker = context.worker
        self._cut = context.cut
        self._width, self._vocabulary = stage.cut_width, stage.vocab_size
        self._share = share = context.settings.generate_share
        self._rations = Rations(share, SAVED_WINDOWS * spec.data.sequence_length, lambda: worker.last_trained.tokens)
        self._held = 0
        self.accepting = False
        """Whether windows are taken now."""
        self._behind = behind

    def serve(self, transport: Transport) -> tuple[Withdraw, ...]:
        """Register with the transport, where the node gives anything."""
        return (on_tensors(transport, FORWARD, self.handle, self.admit),) if self._share > 0.0 else ()

    def admit(self, peer: PeerId, request: ForwardHeader, specs: tuple[TensorSpec, ...]) -> Release:
        """Refuse what is not meant for this node, malformed, or too much now, before a byte of the body is read."""
        if not self.accepting:
            raise Refused(Refusal.DRAINING)
        check_addressed(
            run=request.run,
            stage=request.stage,
            own_run=self._spec.run_id,
            own_stage=self._cut.index,
            protocol=request.protocol,
        )
        tokens = self._tokens_of(specs)
        if self._held >= AT_ONCE or self._behind.stands_back:
            raise Refused(Refusal.BUSY, f"{self._held} windows of generated texts are held here")
        self._rations.take(peer, tokens)
        self._held += 1
        return self._release

    async def handle(self, peer: PeerId, _request: ForwardHeader, tensors: tuple[Tensor, ...]) -> Reply[Nothing]:
        """Run the stage on one admitted window."""
        inputs = tensors[0]
        ids = inputs if self._cut.is_first else None if len(tensors) == 1 else tensors[1]
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary):
            raise Refused(Refusal.MALFORMED, f"a token is outside the vocabulary of {self._vocabulary}")
        if not self._cut.is_first and not await found_finite(inputs):
            raise Refused(Refusal.NOT_FINITE, "the activations hold NaN or infinity")
        turn = QueueTurn((FORWARD.name, peer), WEIGHT * inputs.shape[1])
        try:
            return Reply(NOTHING, (await self._forward(inputs, ids, turn),))
        except MicrobatchNotFinite as error:
            raise Refused(Refusal.DIVERGED, str(error)) from None  # with these weights: no proof against the sender
        except NoMemory as error:
            raise Refused(Refusal.BUSY, NO_MEMORY) from error

    async def _forward(self, inputs: Tensor, ids: Tensor | None, turn: QueueTurn) -> Tensor:
        given, beside = (inputs.to(torch.int64), None) if self._cut.is_first else (inputs, ids)
        if self._cut.is_last:
            return await self._worker.last_logits(given, turn, ids=beside)
        return await self._worker.evaluate(given, turn=turn, ids=beside)

    def _tokens_of(self, specs: tuple[TensorSpec, ...]) -> int:
        """Refuse tensors that are not one window's, or a beginning of it."""
        tokens = specs[0].shape[1] if specs and len(specs[0].shape) > 1 else 0
        wanted = window_specs(self._spec, self._cut.is_first, tokens, self._width)
        if specs != wanted:
            raise Refused(Refusal.MALFORMED, f"{_words(specs)} where {_words(wanted)} belongs")
        if not 1 <= tokens <= self._spec.data.sequence_length:
            raise Refused(Refusal.TOO_LARGE, f"{tokens} tokens; a window has {self._spec.data.sequence_length}")
        return tokens

    def _release(self) -> None:
        self._held -= 1


def window_specs(spec: RunSpec, is_first: bool, tokens: int, width: int) -> tuple[TensorSpec, ...]:
    """What goes to a stage: token ids to the first, activations to others, with the ids beside them in a subspace."""
    ids = TensorSpec("i32", (1, tokens))
    if is_first:
        return (ids,)
    activations = TensorSpec(DTYPE_NAMES[carried_dtype(spec.pipeline.activations)], (1, tokens, width))
    return (activations,) if spec.model.subspace_rank is None else (activations, ids)


def _words(specs: tuple[TensorSpec, ...]) -> str:
    return " and ".join(f"{spec.dtype} {spec.shape}" for spec in specs) or "nothing"
