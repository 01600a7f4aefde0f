"""A whole training of many replicas in one process: `simulate`.

It is deterministic under its seed on one machine. A daemon waits; the simulation counts ticks. In one tick each stage-0
replica draws one microbatch, its share of the global batch, which takes its random way through the stages and back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.experiments import Algorithm, WorldSpec
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.windows import Windows, load_windows
from noloco_node.document_marks import positions_of
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.laboratory.figures import MeasuredLoss, MeasuredSpread, Measurement
from noloco_node.laboratory.stacked import StackedForward, StackedStage, token_losses
from noloco_node.laboratory.stage_group import ReplicaAccount, StageGroup
from noloco_node.pipeline.activations import there_and_back
from noloco_node.pipeline.routing import Candidate, choose_peer
from noloco_node.telemetry.summary import TRAINING_LOSS_SHARE
from noloco_node.training.progress import Progress, credit_after_step, learning_rate, share_of_batch


def simulate(
    run: RunSpec,
    world: WorldSpec,
    algorithm: Algorithm,
    *,
    replicas: int,
    seed: int,
    evaluations: int,
    divergence_points: int,
) -> Measurement:
    """Train `replicas` of each stage to the run's target and measure.

    Raises UserError (CONFIG) where the global batch cannot be divided among the replicas, (DATA) as `load_windows`.
    """
    started = ambient.monotonic()
    training = Training(run, world, algorithm, replicas, seed)
    training.run_to_the_end(evaluations, divergence_points)
    return training.measured(ambient.monotonic() - started)


def microbatch_windows(run: RunSpec, replicas: int) -> int:
    """Windows of a replica's inner step, which is one microbatch. Raises UserError (CONFIG) where they are no whole
    number."""
    pieces = replicas * run.data.sequence_length
    if run.inner.global_batch_tokens % pieces:
        raise UserError(
            ExitCode.CONFIG,
            f"inner.global_batch_tokens is {run.inner.global_batch_tokens}: it cannot be divided among {replicas} "
            f"replicas in whole windows of {run.data.sequence_length} tokens (data.sequence_length)",
            f"make it a multiple of {pieces}",
        )
    return run.inner.global_batch_tokens // pieces


def windows_of(data: DataSpec, vocabulary: int) -> Windows:
    """The text, read once in a process."""
    return _windows_of(data.model_dump_json(), vocabulary)


@lru_cache(maxsize=2)
def _windows_of(data: str, vocabulary: int) -> Windows:
    return load_windows(DataSpec.model_validate_json(data), vocabulary)


class Training:
    """The replicas of all stages, their outer steps, and what has been measured."""

    def __init__(self, run: RunSpec, world: WorldSpec, algorithm: Algorithm, replicas: int, seed: int) -> None:
        self._run, self._seed, self._replicas = run, seed, replicas
        self._exchanging = algorithm not in ("local", "data_parallel")
        stacked = 1 if algorithm == "data_parallel" else replicas
        self._walkers_a_row = replicas // stacked
        self._windows_a_walker = microbatch_windows(run, replicas)
        vocabulary = run.model.config.get("vocab_size", 256)
        assert isinstance(vocabulary, int)
        self._windows = windows_of(run.data, vocabulary)
        self._walks = [self._windows.walk(seed, f"{index:06d}") for index in range(replicas)]
        self._held_out = self._windows.validation_indices(run.evaluation.windows)
        self._rng = random.Random(f"world/{seed}")
        model = run.model.model_copy(update={"seed": seed})
        self._stages = [StackedStage(model, run.inner, index, stacked) for index in range(run.stages)]
        start = Progress()
        self._accounts = [[ReplicaAccount(start) for _ in range(stacked)] for _ in self._stages]
        self._peers = [PeerId(f"{index:06d}") for index in range(stacked)]
        self._stage_groups = [
            StageGroup(run, world, algorithm, stage, accounts, self._rng, f"{seed}/{index}")
            for index, (stage, accounts) in enumerate(zip(self._stages, self._accounts, strict=True))
        ]
        self._backlog = [[0] * stacked for _ in self._stages]
        self._tick = 0
        self._trained = 0
        self._losses: list[tuple[int, float]] = []
        self._diverged = False
        self._curve: list[MeasuredLoss] = []
        self._spread: list[MeasuredSpread] = []
        self._final: tuple[float | None, float | None, float | None] = (None, None, None)

    def run_to_the_end(self, evaluations: int, divergence_points: int) -> None:
        """Train until every stage-0 replica's clock has reached the target; then the last outer step."""
        target = self._run.inner.target_tokens
        next_loss, next_spread = 0.0, 0.0
        while not self._diverged and (drawing := self._drawing(target)):
            clock = self._clock()
            if clock >= next_spread:
                self._spread.append(self._measure_spread(clock))
                next_spread += target / divergence_points
            if clock >= next_loss:
                self._curve.append(MeasuredLoss(tokens=round(clock), validation_loss=self._evaluate_replicas()))
                next_loss += target / evaluations
            self._draw_and_train(drawing)
            self._tick += 1
            if self._exchanging:
                for stage_group in self._stage_groups:
                    stage_group.tick(self._tick)
        self._finish()

    def measured(self, seconds: float) -> Measurement:
        """The figures."""
        tallies = [stage_group.tally for stage_group in self._stage_groups]
        joined, alone = sum(t.joined for t in tallies), sum(t.alone for t in tallies)
        rows = len(self._peers)
        steps = [account.progress.steps for accounts in self._accounts for account in accounts]
        mean_steps = sum(steps) / len(steps)
        parameters = sum(stage.layout.size for stage in self._stages)
        sent = sum(t.bytes_sent for t in tallies) / rows
        each = sent / max(1e-9, joined / rows / len(tallies)) if joined else 0.0
        recent = [loss for tokens, loss in self._losses if tokens >= (1 - TRAINING_LOSS_SHARE) * self._trained]
        final, fast, merged = self._final
        return Measurement(
            seed=self._seed,
            stages=self._run.stages,
            replicas=self._replicas,
            parameters=parameters,
            tokens=self._trained,
            validation_loss=final,
            validation_loss_fast=fast,
            validation_loss_merged=merged,
            training_loss=_finite(sum(recent) / len(recent)) if recent else None,
            diverged=self._diverged,
            curve=self._curve,
            spread=self._spread,
            inner_steps=round(mean_steps),
            outer_rounds=joined / rows / len(tallies),
            alone_share=alone / max(1, alone + joined),
            clipped_share=sum(t.clipped for t in tallies) / max(1, joined),
            bytes_per_outer_step=each,
            bytes_per_inner_step=sent / max(1.0, mean_steps),
            seconds=seconds,
        )

    @property
    def parts(self) -> tuple[Sequence[StageGroup], Sequence[StackedStage]]:
        """The outer steps and the replicas of each stage."""
        return self._stage_groups, self._stages

    def merged_weights(self) -> list[Tensor]:
        """The mean of the replicas' weights, [size], for each stage."""
        return [stage.fast.double().mean(0).float() for stage in self._stages]

    def clocks(self) -> list[float]:
        """The clocks of every replica, stage by stage."""
        return [account.progress.clock for accounts in self._accounts for account in accounts]

    def _drawing(self, target: int) -> list[int]:
        """Stage-0 replicas that have not reached the target."""
        return [index for index, own in enumerate(self._accounts[0]) if own.progress.clock < target]

    def _clock(self) -> float:
        return sum(account.progress.clock for account in self._accounts[0]) / len(self._accounts[0])

    def _draw_and_train(self, drawing: Sequence[int]) -> None:
        inputs, labels = self._batches(drawing)
        for places, routes in self._waves(drawing):
            self._train(routes, inputs[places], labels[places])
            self._step_where_due()

    def _waves(self, drawn: Sequence[int]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """The microbatches in groups that visit no replica twice: places within `drawn`, and the replicas of each
        stage. Each is thus computed on the weights after the steps of those before it."""
        routes = [list(drawn)]
        for stage in range(1, len(self._stages)):
            routes.append(self._route(stage, routes[-1]))
        left = list(range(len(drawn)))
        while left:
            wave: list[int] = []
            taken: set[tuple[int, int]] = set()
            for place in left:
                visits = {(stage, rows[place]) for stage, rows in enumerate(routes)}
                if not visits & taken:
                    wave.append(place)
                    taken |= visits
            yield wave, [torch.tensor([rows[place] for place in wave]) for rows in routes]
            left = [place for place in left if place not in set(wave)]

    def _batches(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and labels [M, B, T] of the next microbatch of each row."""
        taken: list[int] = []
        for row in rows:
            for walker in range(row * self._walkers_a_row, (row + 1) * self._walkers_a_row):
                taken += self._walks[walker].take(self._windows_a_walker)
        inputs, labels = self._windows.train(taken)
        shape = (len(rows), -1, inputs.shape[1])
        return inputs.view(shape), labels.view(shape)

    def _train(self, routes: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> None:
        """Forward and backward of some microbatches [M, B, T]; `routes` names the replica of each at every stage."""
        codec = self._run.pipeline.activations[0]
        passages: list[StackedForward] = []
        values, positions = inputs, _positions(labels)
        for index, (stage, rows) in enumerate(zip(self._stages, routes, strict=True)):
            arriving = there_and_back(values, codec) if index else values
            passages.append(stage.forward(rows, arriving, positions, inputs))
            values = passages[-1].outputs
        passages[-1], losses = self._stages[-1].with_loss(passages[-1], labels)
        total = float(losses.sum())
        if not math.isfinite(total):
            self._diverged = True
            return
        gradient: Tensor | None = None
        for stage, passage in zip(reversed(self._stages), reversed(passages), strict=True):
            gradient = stage.backward(passage, gradient, labels[0].numel())
            if gradient is not None:
                gradient = there_and_back(gradient, codec)
        self._trained += labels.numel()
        self._losses.append((self._trained, total / labels.numel()))

    def _route(self, stage: int, senders: Sequence[int]) -> list[int]:
        """The next-stage replica for each microbatch, by the daemon's own choice."""
        backlog = self._backlog[stage]
        candidates = [Candidate(peer, 0, load) for peer, load in zip(self._peers, backlog, strict=True)]
        chosen: list[int] = []
        for sender in senders:
            peer = choose_peer(self._run.pipeline.routing, candidates, own_rank=sender, now=0.0, rng=self._rng)
            assert peer is not None, "every stage has a replica"
            row = int(peer)
            backlog[row] += 1
            candidates[row] = Candidate(peer, 0, backlog[row])
            chosen.append(row)
        for row in range(len(backlog)):
            backlog[row] = max(0, backlog[row] - 1)
        return chosen

    def _step_where_due(self) -> None:
        inner = self._run.inner
        for stage, accounts in zip(self._stages, self._accounts, strict=True):
            share = share_of_batch(inner.global_batch_tokens, len(accounts))
            due: list[int] = []
            rates: list[float] = []
            for row, account in enumerate(accounts):
                gathered = stage.tokens[row]
                credit = credit_after_step(gathered, account.credit, share)
                if gathered and credit is not None:
                    account.credit = credit
                    account.progress = account.progress.after_inner_step(gathered, len(accounts))
                    due.append(row)
                    rates.append(self._rate(account.progress.clock))
            if due:
                stage.step(due, rates)

    def _rate(self, clock: float) -> float:
        inner = self._run.inner
        return learning_rate(
            clock,
            peak=inner.learning_rate,
            minimum_ratio=inner.min_learning_rate_ratio,
            warmup=inner.warmup_tokens,
            target=inner.target_tokens,
        )

    def _measure_spread(self, clock: float) -> MeasuredSpread:
        total, size = 0.0, 0
        for stage in self._stages:
            if stage.replicas > 1:
                total += float(stage.fast.float().var(0).double().sum())
            size += stage.layout.size
        return MeasuredSpread(
            step=self._tick, tokens=round(clock), learning_rate=self._rate(clock), spread=_finite(total / size)
        )

    def _finish(self) -> None:
        clock = self._clock()
        self._spread.append(self._measure_spread(clock))
        fast = self._evaluate_replicas()
        self._curve.append(MeasuredLoss(tokens=round(clock), validation_loss=fast))
        if self._diverged or fast is None:
            self._diverged = True
            return
        if self._exchanging:
            for stage_group in self._stage_groups:
                stage_group.last()
        final = self._evaluate_replicas()
        merged = [weights[None] for weights in self.merged_weights()]
        self._final = (final, fast, _finite(self._loss(merged, self._held_out)))
        self._diverged = final is None

    def _evaluate_replicas(self) -> float | None:
        """Mean loss over all held-out windows, divided among the replicas; the first may have one more than others."""
        rows, count = len(self._peers), len(self._held_out)
        if count < rows:
            raise UserError(
                ExitCode.CONFIG,
                f"evaluation.windows gives {count} windows for {rows} replicas",
                f"set evaluation.windows to {rows} or more",
            )
        even, weights = count // rows * rows, [stage.fast for stage in self._stages]
        total = self._loss(weights, self._held_out[:even])
        if even < count:
            rest = self._loss([fast[: count - even] for fast in weights], self._held_out[even:])
            total = (even * total + (count - even) * rest) / count
        return _finite(total)

    def _loss(self, weights: Sequence[Tensor], indices: Sequence[int]) -> float:
        """The mean over these windows, divided among replicas with these weights."""
        inputs, labels = self._windows.validation(indices)
        inputs, labels = (each.view(len(weights[0]), -1, inputs.shape[1]) for each in (inputs, labels))
        route, values, positions = random.Random(f"evaluation/{self._seed}"), inputs, _positions(labels)
        for index, (stage, fast) in enumerate(zip(self._stages, weights, strict=True)):
            rows = list(range(len(fast)))
            if index:
                route.shuffle(rows)
            values = stage.evaluate(fast[rows], values, positions, inputs)
        return float(token_losses(values, labels).double().mean())


def _positions(labels: Tensor) -> Tensor | None:
    """`positions_of` labels [M, B, T]."""
    found = positions_of(labels.flatten(0, 1))
    return None if found is None else found.view(labels.shape)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
