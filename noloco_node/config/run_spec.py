"""RunSpec: what every peer of a run must agree on. Its canonical hash is the run id."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.settings import Fraction, Positive, PositiveFloat, Settings, canonical_json
from noloco_node.errors import ExitCode, UserError
from noloco_node.outer import CodecName, Momentum
from noloco_node.outer.stability import admissible_gamma, safe_gamma

MAX_BODY_BYTES = 256 << 20
"""Peers grant each other requests with bodies of at most so many bytes."""

MOST_SECONDS = 600.0
"""A transfer of weights takes at most so many seconds, however large it is: at 20 Mbit/s each way that is 1.5 GB."""
CHUNKS_A_DEADLINE = 2.0
"""A transfer of weights moves at least so many chunks each way per progress deadline. With the usual 1 MiB in 20 s that
is 0.84 Mbit/s each way. A line of 20 Mbit/s and 0.2 s, with one chunk in flight, carries fifteen times as much."""

ED25519_PEER_ID = r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$"
"""The form of peer ids from which the public key can be read."""

PrecisionName = Literal["fp32", "bf16", "bf16-mixed", "bf16-pure"]

ActivationCodec = Literal["fp32", "bf16", "fp16", "int8", "int4"]
ACTIVATION_CODECS: tuple[ActivationCodec, ...] = get_args(ActivationCodec)
"""The codecs of activations, from wide to narrow."""
INT8_BLOCK = 128
"""If activations travel as int8, so many numbers of a token share a scale."""
INT4_BLOCK = 64
"""If they travel as int4, so many numbers of a token are rotated together and share a scale."""

OptimizerName = Literal["adamw", "muon"]
Multiplier = Annotated[float, Field(gt=0.0, le=100.0)]
RoutingName = Literal["uniform", "balanced", "fixed"]

RUN_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


class InnerSpec(Settings):
    """Inner training: AdamW or Muon with warm-up and cosine, steps by the replica's share of the global batch."""

    target_tokens: Positive
    """The run ends when the whole swarm has trained so many tokens."""
    global_batch_tokens: Positive
    """Tokens over all replicas of a stage that one inner step stands for."""
    microbatch_windows: Annotated[int, Field(gt=0, le=4096)] = 8
    """Windows of `data.sequence_length` tokens in one microbatch."""
    optimizer: OptimizerName = "adamw"
    """`adamw` for all weights; `muon`: orthogonalised momentum for the matrices of layers, AdamW for the others. Muon
    keeps one moment of these matrices in place of two."""
    learning_rate: PositiveFloat = 1e-3
    """At its highest: after the warm-up. One rate serves both optimizers."""
    warmup_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens trained by the swarm up to which the learning rate rises; then it falls along a cosine."""
    precision: PrecisionName = "fp32"
    """`bf16`: forward and backward on bf16 copies of fp32 masters. `bf16-mixed`: on fp32 copies, products in bf16
    (torch's autocast). `bf16-pure`: weights and the optimizer's state in bf16, no masters, as in the paper."""
    backward: Literal["keep", "recompute", "checkpoint"] = "keep"
    """`keep` holds a microbatch's graph until its gradient comes back. `recompute` holds its input only and computes
    the whole stage again. `checkpoint` holds each layer's input and computes one layer again at a time."""
    embedding_rate: Multiplier = 1.0
    """Multiplies the learning rate of the token embeddings; their weight decay stays."""
    head_rate: Multiplier = 1.0
    """Multiple of the learning rate for the head, which gives the logits."""
    norm_rate: Multiplier = 1.0
    """Multiple of the learning rate for norms and biases."""
    min_learning_rate_ratio: Fraction = 0.1
    """Share of `learning_rate` left at the end of the cosine."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Applies to matrices; vectors (norms, biases) are not decayed."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW: share of the first moment that an inner step keeps."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW: share of the second moment that an inner step keeps."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""
    clip_norm: PositiveFloat = 1.0
    """Gradient norm bound of each stage (a stage cannot know the norm of the others)."""

    @model_validator(mode="after")
    def _warmup_before_target(self) -> InnerSpec:
        if self.warmup_tokens >= self.target_tokens:
            raise ValueError(
                f"run.inner.warmup_tokens ({self.warmup_tokens}) must be below run.inner.target_tokens "
                f"({self.target_tokens}): lower the warm-up or train longer"
            )
        if self.global_batch_tokens > self.target_tokens:
            raise ValueError(
                f"run.inner.global_batch_tokens ({self.global_batch_tokens}) exceeds run.inner.target_tokens "
                f"({self.target_tokens}): not one inner step would be taken"
            )
        if self.learning_rate * self.weight_decay >= 1.0:
            raise ValueError(
                f"run.inner.learning_rate ({self.learning_rate}) × run.inner.weight_decay ({self.weight_decay}) is 1 "
                "or more: the decay alone would turn the weights around; lower one of them"
            )
        return self


class OuterSpec(Settings):
    """The outer step: NoLoCo's pair averaging with momentum (arXiv 2506.10911, one-tensor form)."""

    inner_steps: Positive = 8
    """H: inner steps after which a replica dials a stage peer."""
    min_inner_steps: Annotated[int, Field(ge=0)] | None = None
    """H_min: inner steps from which a replica may be dialled; H/2 where not set."""
    alpha: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Outer momentum; 0 is plain averaging (docs/outer-step.md says when more is better)."""
    beta: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    """Outer learning rate; at most 1 - alpha keeps the effective rate at or below 1."""
    gamma: PositiveFloat | None = None
    """Pull to the group's mean; 1 - alpha where not set."""
    momentum: Momentum = "averaged"
    """`averaged`: the momentum is averaged over the group at no cost in bytes; `local`: the rule of the NoLoCo
    paper."""
    codec: CodecName = "int4"
    """How the exchanged tensor travels: rounded; or as codes modulo 2^8 or 2^4 of the difference to the partner.
    `dct` sends only the largest DCT coefficients of its own motion, `sign` only the signs, and both a sixteenth of
    the rest."""
    max_lag_tokens: Positive | None = None
    """A replica that is more than so many trained tokens behind its partner takes the partner's state instead of
    averaging. If not set, it is 4·H inner steps' worth of tokens."""

    @property
    def effective_gamma(self) -> float:
        """γ, or its default 1 − α."""
        return 1.0 - self.alpha if self.gamma is None else self.gamma

    @property
    def effective_min_inner_steps(self) -> int:
        """H_min, or its default H/2 (at least 1)."""
        return max(1, self.inner_steps // 2) if self.min_inner_steps is None else self.min_inner_steps

    @field_validator("codec", mode="before")
    @classmethod
    def _codec_of_old(cls, value: object) -> object:
        if value == "bf16":
            raise ValueError(
                "run.outer.codec: bf16 is no longer a codec of the outer step, since its rounding was as large as the "
                "differences that it carried; use fp16, which has as many bytes, or int8, which has half of them"
            )
        return value

    @model_validator(mode="after")
    def _clocks(self) -> OuterSpec:
        if self.effective_min_inner_steps > self.inner_steps:
            raise ValueError(
                f"run.outer.min_inner_steps ({self.min_inner_steps}) exceeds run.outer.inner_steps "
                f"({self.inner_steps}): a replica would dial before it may be dialled"
            )
        return self

    @model_validator(mode="after")
    def _stability(self, info: ValidationInfo[dict[str, bool] | None]) -> OuterSpec:
        """The laboratory alone shows what an inadmissible γ does, by the context `allow_inadmissible`; no file can."""
        gamma = self.effective_gamma
        if gamma >= safe_gamma(self.alpha) and not (info.context or {}).get("allow_inadmissible"):
            sharp = admissible_gamma(self.alpha, momentum=self.momentum)[1]
            raise ValueError(
                f"run.outer.gamma ({gamma:g}) is outside the admissible set: with run.outer.alpha {self.alpha:g} it "
                f"must be in (0, {safe_gamma(self.alpha):g}) = (0, 2(1 - alpha)) to be stable for any number of "
                f"replicas and any share of steps taken alone (with very many replicas and every step paired, momentum "
                f"'{self.momentum}' diverges from {sharp:.3g}); leave it out for 1 - alpha = {1 - self.alpha:g}, the "
                "fastest contraction"
            )
        return self


class PipelineSpec(Settings):
    """How microbatches travel between stages."""

    routing: RoutingName = "balanced"
    """`uniform`: the paper's; `balanced`: of two drawn peers the less loaded; `fixed`: for the ablation."""
    activations: Annotated[tuple[ActivationCodec, ...], Field(min_length=1, max_length=len(ACTIVATION_CODECS))] = (
        "fp32",
    )
    """How activations and their gradients may travel: one name, or several. With several a sender takes the widest with
    which a link carries a microbatch in little of the time that the work takes. On slow links it takes the narrowest.
    int8 has a scale of its own for every 128 numbers, int4 for every 64, which it rotates first."""
    budget_seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 60.0
    """Time a microbatch has for its way there and back; each hop fails upward before it ends."""
    progress_seconds: PositiveFloat = 15.0
    """A stream that moves no byte for this long is given up."""
    requeues: Annotated[int, Field(ge=0)] = 5
    """Requeues of a sample after failures at peers that could take it; the next one drops it. Outages do not count."""
    audit_share: Annotated[float, Field(ge=0.0, le=1.0)] = 1 / 32
    """Share of its work that the last stage does twice, at the most, so that gradients of next-stage replicas can be
    compared. It is divided over the hops, and serves stages of three replicas and more. New peers and unusual gradients
    are checked first; what a doubt calls for comes on top. 0: none."""

    @field_validator("activations", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("activations")
    @classmethod
    def _from_wide_to_narrow(cls, value: tuple[ActivationCodec, ...]) -> tuple[ActivationCodec, ...]:
        return tuple(codec for codec in ACTIVATION_CODECS if codec in value)

    @model_validator(mode="after")
    def _progress_within_budget(self) -> PipelineSpec:
        if self.progress_seconds >= self.budget_seconds:
            raise ValueError(
                f"run.pipeline.progress_seconds ({self.progress_seconds:g}) must be below "
                f"run.pipeline.budget_seconds ({self.budget_seconds:g}), or a dead stream would eat the whole budget"
            )
        return self


class EvaluationSpec(Settings):
    """Held-out loss through the swarm: fixed windows, forward only, random routes."""

    every_tokens: Positive
    """Tokens trained by the swarm between two evaluations."""
    windows: Annotated[int, Field(gt=0, le=65536)] = 64
    """Held-out windows that each evaluation takes, the same every time."""


class LimitsSpec(Settings):
    """Bounds that all peers share."""

    least_uplink_mbit: PositiveFloat | None = None
    """What a node must be able to send, in Mbit/s. One whose `node.uplink_mbit` is less is told so before it copies
    anything. Not set: what a microbatch needs."""
    record_seconds: PositiveFloat = 20.0
    """Life of a directory record; it is renewed three times within it."""
    grace_seconds: PositiveFloat = 20.0
    """One wait at the end of the run. A node without work leaves after 15 of these, or 180 while a stage is missing."""
    exchange_progress_seconds: PositiveFloat = 20.0
    """A weight exchange that moves no chunk for this long is aborted on both sides."""
    standby_seconds: PositiveFloat = 120.0
    """How often a copy that `standby_copies` asks for is renewed."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=4 << 20)] = 1 << 20
    """Size of a chunk of weights on the wire."""


class AccessSpec(Settings):
    """The peers that may take part in the run. It is part of the run id: to change it is to start another run."""

    mode: Literal["open", "listed", "invited"] = "open"
    """`open`: everyone; `listed`: the owner and `peers`; `invited`: these, and all peers that the owner has invited."""
    owner: Annotated[str, Field(pattern=ED25519_PEER_ID)] | None = None
    """Peer id of the owner's key, which signs invitations (`noloco-node invite` makes the key and says its id)."""
    peers: tuple[Annotated[str, Field(min_length=10, max_length=128)], ...] = ()
    """Peer ids that are admitted by name (`noloco-node identity show` prints a node's)."""

    @model_validator(mode="after")
    def _of_one_mind(self) -> AccessSpec:
        if self.mode == "invited" and self.owner is None:
            raise ValueError("run.access.mode is 'invited' but run.access.owner, whose key invites, is not set")
        if self.mode == "listed" and not self.peers:
            raise ValueError(
                "run.access.mode is 'listed' but run.access.peers is empty: name the peer ids that may take part"
            )
        if self.mode == "open" and self.peers:
            raise ValueError(
                "run.access.peers is set but run.access.mode is 'open': set run.access.mode to listed or invited"
            )
        return self


class RunSpec(Settings):
    """Everything that peers must agree on. Two nodes meet only if theirs are equal: the hash is the run id."""

    name: Annotated[str, Field(pattern=RUN_NAME)]
    """What people call the run: small letters, digits, dots, hyphens, 64 at most."""
    standby_copies: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of other stages that keep a copy of each stage's slow weights (2 bytes a parameter on the disk). A stage
    that has lost all of its replicas is restored from it. 0: it would start again from the seed."""
    model: ModelSpec
    data: DataSpec = DataSpec()
    inner: InnerSpec
    evaluation: EvaluationSpec
    access: AccessSpec = AccessSpec()
    outer: OuterSpec = OuterSpec()
    pipeline: PipelineSpec = PipelineSpec()
    limits: LimitsSpec = LimitsSpec()

    @property
    def stages(self) -> int:
        """Pipeline stages (P)."""
        return self.model.stages

    @property
    def microbatch_tokens(self) -> int:
        """Tokens that one microbatch predicts."""
        return self.inner.microbatch_windows * self.data.sequence_length

    def microbatches_a_step(self, replicas: int) -> int:
        """That a replica trains on between two inner steps, where so many share the batch."""
        return max(1, math.ceil(self.inner.global_batch_tokens / (max(1, replicas) * self.microbatch_tokens)))

    @property
    def most_sharing(self) -> int:
        """Replicas of a stage from which on each microbatch is an inner step."""
        return math.ceil(self.inner.global_batch_tokens / self.microbatch_tokens)

    @property
    def max_lag_tokens(self) -> int:
        """Clock difference beyond which a partner is caught up with instead of averaged with."""
        return self.outer.max_lag_tokens or 4 * self.outer.inner_steps * self.inner.global_batch_tokens

    @property
    def agreed_json(self) -> str:
        """What all peers have in common, as canonical JSON: the run id is its hash, and a joiner is told it. Some paths
        are a volunteer's own affair and not in it. They are those of the text of a `text` source, or a prepared one, of
        a tokenizer's folder, and of the weights that the run began with."""
        agreed = self.model_dump(mode="json")
        del agreed["model"]["from_pretrained"]
        del agreed["data"]["prepared"]
        if self.data.own_tokenizer:
            del agreed["data"]["tokenizer"]
        for source in (agreed["data"], *agreed["data"]["mixture"]):
            if source["source"] == "text":
                del source["path"]
        return canonical_json(agreed)

    @cached_property
    def run_id(self) -> str:
        """The first 32 hex digits of the SHA-256 of `agreed_json`. Every message that travels asks for it."""
        return hashlib.sha256(self.agreed_json.encode()).hexdigest()[:32]

    def __copy__(self) -> Self:
        copied = super().__copy__()
        vars(copied).pop("run_id", None)  # pydantic makes a changed model of a copy of the first
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        copied = super().__deepcopy__(memo)
        vars(copied).pop("run_id", None)
        return copied

    @model_validator(mode="after")
    def _microbatch_fits(self) -> RunSpec:
        if self.microbatch_tokens > self.inner.global_batch_tokens:
            raise ValueError(
                f"one microbatch holds {self.microbatch_tokens} tokens (run.inner.microbatch_windows "
                f"{self.inner.microbatch_windows} × run.data.sequence_length {self.data.sequence_length}), more than "
                f"run.inner.global_batch_tokens ({self.inner.global_batch_tokens}): lower one or raise the other"
            )
        if (blocks := self.data.block_windows) is not None and blocks < self.inner.microbatch_windows:
            raise ValueError(
                f"run.data.block_windows is {blocks}, less than one microbatch (run.inner.microbatch_windows "
                f"{self.inner.microbatch_windows}): set it so that a replica reads a block for minutes, or leave it out"
            )
        return self


def token_bytes(numbers: int, codec: ActivationCodec) -> int:
    """Bytes on the wire of one token's activations, so many numbers."""
    if codec == "int8":
        return numbers + 4 * -(-numbers // INT8_BLOCK)
    if codec == "int4":
        return (INT4_BLOCK // 2 + 2) * -(-numbers // INT4_BLOCK)
    return numbers * (4 if codec == "fp32" else 2)


def check_microbatch_bytes(run: RunSpec, width: int) -> None:
    """Raise UserError (CONFIG) where a microbatch of activations of `width` numbers and labels exceeds MAX_BODY_BYTES.

    Every peer would refuse it, however often it is sent. With one stage nothing travels.
    """
    codec = run.pipeline.activations[0]
    token = token_bytes(width, codec) + 4
    size = run.microbatch_tokens * token
    if run.stages == 1 or size <= MAX_BODY_BYTES:
        return
    windows = MAX_BODY_BYTES // (run.data.sequence_length * token)
    raise UserError(
        ExitCode.CONFIG,
        f"run.inner.microbatch_windows is {run.inner.microbatch_windows}: with run.data.sequence_length "
        f"{run.data.sequence_length}, {width} numbers a token and run.pipeline.activations {codec} one "
        f"microbatch takes {size} bytes on the wire, and peers accept {MAX_BODY_BYTES}",
        f"set run.inner.microbatch_windows to {windows} or less"
        if windows
        else "lower run.data.sequence_length: one window is too large",
    )
