"""The outer steps of all replicas of one stage: which replicas average, when, and with what effect.

The decisions are those of the daemon (`averaging.matchmaking`), the arithmetic is that of the daemon (`outer`); only
the wire is left out. Time is counted in ticks: in one tick a replica of full speed takes one microbatch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.averaging.matchmaking import Dial, PairingState, StepAlone, Window, answer_proposal, decide
from noloco_node.config.experiments import Algorithm, WorldSpec
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.laboratory.stacked import StackedStage
from noloco_node.outer.clipping import PartnerBound
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import OuterReplica, gauge_coordinates
from noloco_node.outer.update import OuterRule, token_weights
from noloco_node.peers.partners import Partners
from noloco_node.training.progress import Progress


@dataclass(slots=True)
class ReplicaAccount:
    """Where one replica stands."""

    progress: Progress
    free_since: int = 0
    """Inner steps when its last exchange ended; a step alone is none."""
    credit: float = 0.0
    """Tokens beyond its share of the batch at the last inner step."""


@dataclass(slots=True, eq=False)
class LabMeeting:
    """An outer step of one or more replicas."""

    members: tuple[int, ...]
    snapshots: tuple[Progress, ...]
    """The progress of each member at its snapshot."""


@dataclass(slots=True)
class Tally:
    """What the outer steps came to, over all replicas of the stage."""

    paired: int = 0
    alone: int = 0
    clipped: int = 0
    joined: int = 0
    """Members that took part in paired steps."""
    bytes_sent: int = 0
    """By all replicas."""


class StageGroup:
    """All replicas of one stage at their outer steps. `accounts` are kept by the training, which owns the replicas."""

    def __init__(
        self,
        run: RunSpec,
        world: WorldSpec,
        algorithm: Algorithm,
        stage: StackedStage,
        accounts: Sequence[ReplicaAccount],
        rng: random.Random,
        name: str,
    ) -> None:
        self._run = run
        self._world = world
        self._everyone = algorithm == "diloco"
        self._stage = stage
        self._accounts = accounts
        self._rng = rng
        self._name = name
        self._peers = [PeerId(f"{index:06d}") for index in range(len(accounts))]
        self._stage_peers = len(accounts) - 1
        self._window = Window(run.outer.inner_steps, run.outer.effective_min_inner_steps)
        self._held = 0
        self.tally = Tally()
        outer = run.outer
        rule = OuterRule(outer.alpha, outer.beta, outer.effective_gamma, outer.momentum)
        self.replicas = [
            OuterReplica(
                rule, row.to(torch.float32, copy=True), codec=CODECS[outer.codec], chunk_bytes=run.limits.chunk_bytes
            )
            for row in stage.fast
        ]
        self._bounds = [PartnerBound() for _ in self.replicas]
        self._visits = [Partners() for _ in self.replicas]

    def bytes_to(self, partners: int) -> int:
        """What one member sends in an exchange: payload, sketch and gauge to each partner."""
        size = self.replicas[0].size
        payload = self.replicas[0].codec.wire_bytes(size) * self._world.tensors_sent
        if self._everyone:  # a ring all-reduce
            return round(2 * partners / (partners + 1) * payload)
        gauge = 4 * gauge_coordinates("", size).numel()
        return (payload + gauge) * partners

    def tick(self, now: int) -> None:
        """Let every replica decide."""
        if self._everyone:
            self._meet_all()
            return
        # A daemon pauses for 0.05 to 0.3 of an inner step after a refusal.
        for _ in range(6):
            order = list(range(len(self._accounts)))
            self._rng.shuffle(order)
            for index in order:
                self._decide(index, now)

    def last(self) -> None:
        """The last outer step: everyone averages once more. Of an odd number the last are three."""
        order = list(range(len(self._accounts)))
        self._rng.shuffle(order)
        n = len(order) if self._everyone else 2
        groups = [order[low : low + n] for low in range(0, len(order), n)]
        if len(groups) > 1 and len(groups[-1]) < 2:
            groups[-2:] = [groups[-2] + groups[-1]]
        for members in groups:
            self._step(tuple(members))

    def _decide(self, index: int, now: int) -> None:
        account = self._accounts[index]

        def stage_peers() -> list[PeerId]:
            return self._peers[:index] + self._peers[index + 1 :]

        state = PairingState(
            steps_since_outer=account.progress.steps_since_outer,
            steps_free=account.progress.steps - account.free_since,
            stage_peers=stage_peers,
            engaged=False,
            next_try=0.0,
        )
        decision = decide(state, self._window, now=float(now), rng=self._rng)
        if isinstance(decision, StepAlone):
            self._step((index,))
        elif isinstance(decision, Dial):
            partner = int(decision.partner)
            if self._accepts(partner, index) and not self._caught_up(index, partner):
                self._step((index, partner))

    def _accepts(self, dialled: int, dialler: int) -> bool:
        refusal = answer_proposal(
            own=self._peers[dialled],
            dialler=self._peers[dialler],
            dialling=None,
            too_often=self._visits[dialled].too_many(self._peers[dialler], self._stage_peers),
            steps_since_outer=self._accounts[dialled].progress.steps_since_outer,
            window=self._window,
            last_round=False,
        )
        return refusal is None

    def _caught_up(self, left: int, right: int) -> bool:
        """Whether one of two was too far behind and took the other's state instead of averaging."""
        behind, ahead = sorted((left, right), key=lambda index: self._accounts[index].progress.clock)
        account, other = self._accounts[behind], self._accounts[ahead].progress
        if other.clock - account.progress.clock <= self._run.max_lag_tokens:
            return False
        self._stage.copy(ahead, behind)
        source = self.replicas[ahead]
        self.replicas[behind].load(source.slow, source.momentum, source.trail)
        account.progress = account.progress.as_copy_of(other.clock, other.outer_rounds)
        account.free_since = account.progress.steps
        return True

    def _meet_all(self) -> None:
        """DiLoCo: everyone, as soon as the mean replica has taken H steps since the last time."""
        members = tuple(range(len(self._accounts)))
        since = sum(account.progress.steps_since_outer for account in self._accounts)
        if since >= self._run.outer.inner_steps * len(members):
            self._step(members)

    def _step(self, members: tuple[int, ...]) -> None:
        self._commit(self._open(members))

    def _open(self, members: tuple[int, ...]) -> LabMeeting:
        self._held += 1
        replicas = [self.replicas[index] for index in members]
        snapshots = tuple(self._accounts[index].progress for index in members)
        weights = token_weights([progress.tokens_since_outer for progress in snapshots])
        for index, replica, weight in zip(members, replicas, weights, strict=True):
            replica.snapshot.copy_(self._stage.fast[index])
            replica.open(members=len(members), weight=weight, exchange=f"{self._name}/{self._held}")
        return LabMeeting(members, snapshots)

    def _commit(self, meeting: LabMeeting) -> None:
        paired = len(meeting.members) > 1
        if paired:
            self._exchange(meeting)
        mean_clock = sum(progress.clock for progress in meeting.snapshots) / len(meeting.snapshots)
        for place, index in enumerate(meeting.members):
            account, replica = self._accounts[index], self.replicas[index]
            scale = self._clip(index, meeting) if paired else 1.0
            kept = replica.momentum if self._world.nesterov else None
            before = None if kept is None else kept.clone()
            self._stage.fast[index].add_(replica.commit(scale))
            if before is not None:
                self._look_ahead(index, before)
            snapshot = meeting.snapshots[place]
            account.progress = account.progress.after_outer_step(snapshot, mean_clock - snapshot.clock)
            if place > 0:
                self._visits[index].made(self._peers[meeting.members[0]], self._stage_peers)
            self._visits[index].stepped()
            if paired:
                account.free_since = account.progress.steps
        if paired:
            self.tally.paired += 1
            self.tally.joined += len(meeting.members)
            self.tally.bytes_sent += len(meeting.members) * self.bytes_to(len(meeting.members) - 1)
        else:
            self.tally.alone += 1

    def _look_ahead(self, index: int, before: Tensor) -> None:
        """Nesterov's momentum: of φ ← φ + α δ' + β Δ, with δ' = α δ + β Δ, heavy-ball momentum has made φ + δ'; what is
        missing is α (δ' − δ)."""
        replica = self.replicas[index]
        assert replica.momentum is not None, "there is one where α is not 0, and only there does it look ahead"
        ahead = (replica.momentum - before).mul_(replica.rule.alpha)
        replica.slow.add_(ahead)
        self._stage.fast[index].add_(ahead)

    def _exchange(self, meeting: LabMeeting) -> None:
        """Sketches, then all chunks, each to every other member."""
        group = [self.replicas[index] for index in meeting.members]
        sketches = [replica.sketch() for replica in group]
        for place, replica in enumerate(group):
            replica.agree(sketches[:place] + sketches[place + 1 :])
        for chunk in range(group[0].chunks):
            encoded = [replica.encoded_chunk(chunk) for replica in group]
            for place, replica in enumerate(group):
                for other, wire in enumerate(encoded):
                    if other != place:
                        replica.add_chunk(chunk, wire)

    def _clip(self, index: int, meeting: LabMeeting) -> float:
        if self._everyone:
            return 1.0
        replica = self.replicas[index]
        bound = self._bounds[index]
        others = "+".join(self._peers[member] for member in meeting.members if member != index)
        judgement = bound.judge(replica, others, stage_peers=self._stage_peers)
        bound.accept(others, judgement)
        self.tally.clipped += judgement.scale < 1.0
        return judgement.scale
