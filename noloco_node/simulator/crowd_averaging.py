"""Inner and outer steps of a crowd.

When and with which peer a node averages is its own decision (`matchmaking`, `Partners`, `schedule`). What an outer step
does to the weights is the node's own code, too (`outer.update`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from noloco_node.averaging.matchmaking import (
    Dial,
    PairingState,
    StepAlone,
    Window,
    answer_proposal,
    decide,
    retry_delay,
)
from noloco_node.directory.peer_clocks import laggard, lags
from noloco_node.outer.update import OuterRule, contribution, step_
from noloco_node.peers.partners import Partners
from noloco_node.simulator.crowd_nodes import PROGRESS_SECONDS, Nodes, Pairs
from noloco_node.simulator.crowd_records import CrowdDirectory
from noloco_node.training.progress import Progress, credit_after_step, share_of_batch, staggered, tied_pace
from noloco_node.transport.errors import Refusal
from noloco_node.trust.sources_seen import weighted_median

RULE = OuterRule(alpha=0.0, beta=1.0, gamma=1.0, momentum="averaged")
"""The defaults of a run."""
MICROBATCH_TOKENS = 4096
DIAL_SECONDS = 5.0
"""Seconds until a dialler knows that nobody answers."""
LAG_ROUNDS = 4
"""The allowed lag in outer rounds of H inner steps' worth of tokens: the default of `outer.max_lag_tokens`."""
ORIGINS_HEARD = 1024
"""So many origins' clocks are heard; of more, each so-manieth is."""
NO_LIMIT = 1 << 40
"""The most replicas if the directory is by buckets."""


class CrowdAveraging:
    """The replicas' counts and weights. Weights learn nothing: how their spread shrinks shows how well they mix."""

    def __init__(self, nodes: Nodes, directory: CrowdDirectory, generator: torch.Generator) -> None:
        self.nodes = nodes
        self.directory = directory
        self.agenda = nodes.agenda
        work = nodes.settings.work
        self.window = Window(work.inner_steps, work.min_inner_steps)
        many = nodes.settings.dimensions
        self.slow = torch.randn((nodes.most, many), generator=generator)
        self.momentum = torch.zeros_like(self.slow)
        self.expected = [1.0] * nodes.most
        """The variance of each node's weights, by arithmetic: as if nodes that meet had never met before."""
        self.progress: list[Progress] = []
        self._free_since: list[int] = []
        self._engaged: list[int] = []
        """The partner that each is engaged with, or -1."""
        self._dialling: list[int] = []
        self._gathered: list[int] = []
        self._credit: list[float] = []
        self._stepped_at: list[float] = []
        self._step_seconds: list[float] = []
        self._next_try: list[float] = []
        self._visits: list[Partners] = []
        self._catch_up_from: list[int] = []
        """The peer whose state each is to take as soon as it is free, since it lags too far behind; -1 for none."""
        self._taking: list[bool] = []
        """A stage peer's state is on its way."""
        self.clocks = np.zeros(nodes.most)
        """The present clocks, in tokens."""
        self._middle: list[float] = []
        """The median clock of each stage, as of the last look."""
        self._origins_middle = 0.0
        """The median clock of the first stage, weighed by what each node trains."""
        self._global_batch = 0
        limited = nodes.settings.directory.view == "everybody"
        self._most = nodes.settings.directory.max_replicas if limited else NO_LIMIT
        self.kinds: dict[str, int] = {"paired": 0, "alone": 0, "caught_up": 0}
        self.refusals: dict[str, int] = {}
        self.exchange_seconds = 0.0
        """Seconds of all exchanges that were begun, as the mean of both sides has them."""
        self.meetings = Pairs()

    def joined(self, i: int) -> None:
        """A node that `Nodes.add` gave its number to."""
        assert i == len(self.progress)
        work, rng = self.nodes.settings.work, self.nodes.rng
        # nobody has just averaged when the figures begin: each is somewhere on its way to the next outer step
        self.progress.append(Progress(marks=staggered(1, 0, steps=-rng.randrange(work.inner_steps))))
        self._free_since.append(0)
        self._engaged.append(-1)
        self._dialling.append(-1)
        self._gathered.append(0)
        self._credit.append(0.0)
        self._stepped_at.append(self.agenda.now)
        self._step_seconds.append(1.0)
        self._next_try.append(0.0)
        self._visits.append(Partners())
        self._catch_up_from.append(-1)
        self._taking.append(False)

    def agree(self, replicas: float) -> None:
        """So many replicas of each stage share the global batch from now on."""
        self._global_batch = round(replicas * self.nodes.settings.work.microbatches_a_step * MICROBATCH_TOKENS)

    def look(self) -> None:
        """All nodes read the directory, and each stage's time is known. All hear the same of it: the median of all
        clocks, where a node has that of those that it sees."""
        nodes = self.nodes
        serving = np.flatnonzero(nodes.serving_row)
        by_stage = [serving[nodes.stage_row[serving] == stage] for stage in range(nodes.settings.work.stages)]
        self._middle = [float(np.median(self.clocks[who])) if len(who) else 0.0 for who in by_stage]
        if len(by_stage[0]):
            origins = by_stage[0][:: math.ceil(len(by_stage[0]) / ORIGINS_HEARD)]
            weights = np.rint(1e3 * nodes.speed_row[origins]).astype(np.int64)
            clocks = self.clocks[origins]
            self._origins_middle = weighted_median(zip(clocks.tolist(), weights.tolist(), strict=True))

    @property
    def _most_lag(self) -> float:
        return float(LAG_ROUNDS * self.window.inner_steps * self._global_batch)

    def _lead(self, i: int) -> float | None:
        """By how much the origins are ahead of a node's clock, as it hears; None on the first stage."""
        return None if self.nodes.stage[i] == 0 else self._origins_middle - self.progress[i].clock

    def _went_on(self, i: int, progress: Progress) -> None:
        self.progress[i], self.clocks[i] = progress, progress.clock

    def copy(self, donor: int, i: int) -> None:
        """A node takes over another's state."""
        self.slow[i], self.momentum[i] = self.slow[donor], self.momentum[donor]
        self.expected[i] = self.expected[donor]
        other = self.progress[donor]
        self._went_on(i, self.progress[i].as_copy_of(other.clock, other.outer_rounds, self.window.inner_steps))
        self._free_since[i] = self.progress[i].steps

    def left(self, i: int) -> None:
        """A node is gone, or leaves its stage: what it has under way there comes to nothing."""
        partner, self._engaged[i] = self._engaged[i], -1
        self._dialling[i], self.nodes.exchanging[i] = -1, False
        self._catch_up_from[i], self._taking[i] = -1, False
        if partner >= 0:
            self.agenda.after(PROGRESS_SECONDS, self._give_up, partner, i)

    def _share(self, replicas: int) -> float:
        return share_of_batch(self._global_batch, min(replicas, self._most))

    def missing(self, i: int) -> float:
        """Microbatches until a node's next inner step: a parcel is held back as one of them would be."""
        tokens = self._share(self.directory.replicas(i)) - self._credit[i] - self._gathered[i]
        return math.ceil(tokens / MICROBATCH_TOKENS)

    def trained(self, i: int) -> None:
        """A parcel's gradient is added; an inner step is taken where that is enough."""
        self._gathered[i] += self.nodes.settings.parcel * MICROBATCH_TOKENS
        replicas = self.directory.replicas(i)
        share = self._share(replicas)
        credit = credit_after_step(self._gathered[i], self._credit[i], share)
        if credit is None:
            return
        now = self.agenda.now
        pace = tied_pace(self._lead(i), self._most_lag)
        self._went_on(i, self.progress[i].after_inner_step(self._gathered[i], replicas, pace))
        self._gathered[i], self._credit[i] = 0, credit
        self._step_seconds[i], self._stepped_at[i] = now - self._stepped_at[i], now
        self.consider(i)

    def consider(self, i: int) -> None:
        """Decide about the next outer step."""
        if not self.nodes.serving[i] or self._dialling[i] >= 0:
            return
        if self._catch_up_from[i] >= 0 and not self._busy(i):
            self._catch_up(i)
        progress = self.progress[i]
        state = PairingState(
            progress.steps_since_outer,
            progress.steps - self._free_since[i],
            partial(self.directory.seen, i, 0),
            self._busy(i),
            self._next_try[i],
        )
        decision = decide(state, self.window, now=self.agenda.now, rng=self.nodes.rng)
        if isinstance(decision, Dial):
            self._dialling[i] = int(decision.partner)
            self.agenda.after(self.nodes.latency(i, int(decision.partner)), self._proposed, i, int(decision.partner))
        elif isinstance(decision, StepAlone):
            self._went_on(i, progress.after_outer_step(0, progress, 0.0))
            self._visits[i].stepped()
            self.kinds["alone"] += 1
            self.nodes.tell("alone", i)

    def _proposed(self, i: int, j: int) -> None:
        if self._dialling[i] != j:
            return
        if not self.nodes.reach(i, j) or not self.nodes.serving[j]:
            self.agenda.after(DIAL_SECONDS, self._answered, i, j, "unreachable")
            return
        back = self.nodes.latency(j, i)
        refusal = self._refusal(i, j)
        if refusal is not None:
            self.agenda.after(back, self._answered, i, j, refusal.value)
            return
        if self._judge_lag(i, j) is not None:  # as the dialler finds when the dialled one has opened
            self.agenda.after(back, self._answered, i, j, Refusal.LAGGING.value)
            return
        self._dialling[i] = -1
        self._engaged[i], self._engaged[j] = j, i
        self.nodes.exchanging[i] = self.nodes.exchanging[j] = True
        self._wait_for_turn(i, self._open, i, j)

    def _wait_for_turn(self, i: int, happens: Callable[..., None], *what: object) -> None:
        seconds = self.nodes.turn(i)
        self.exchange_seconds += seconds
        self.agenda.after(seconds, happens, *what)

    def _open(self, i: int, j: int) -> None:
        """The dialler has its snapshot."""
        self._wait_for_turn(j, self._swap, i, j, self.progress[i])

    def _swap(self, i: int, j: int, before_i: Progress) -> None:
        """Both have theirs."""
        seconds = self.nodes.exchange_seconds(i, j, self.nodes.settings.work.exchange_bytes)
        self.exchange_seconds += seconds
        self.agenda.after(seconds, self._complete, i, j, before_i, self.progress[j])

    def _heard(self, i: int) -> tuple[float, ...]:
        """Clocks of a node's stage peers, as the directory has them."""
        return (self._middle[self.nodes.stage[i]],)

    def _busy(self, i: int) -> bool:
        return self._engaged[i] >= 0 or self._taking[i]

    def _judge_lag(self, i: int, j: int) -> str | None:
        """Which of the two a node finds to lag the other too far: `own` or `other`. If it is its own, it is to take the
        other's state from now on."""
        clocks, middle = (self.progress[i].clock, self.progress[j].clock), self._heard(i)
        found = laggard(*clocks, estimated=middle, recorded=middle, max_lag=self._most_lag)
        if found == "own":
            self._catch_up_from[i] = j
        return found

    def _refusal(self, i: int, j: int) -> Refusal | None:
        if not self._busy(j):
            lagging = self._judge_lag(j, i)
            if lagging == "other" and lags(self.progress[i].clock, self._heard(i), by=self._most_lag / 2):
                self._catch_up_from[i] = j
            if lagging is not None:
                self.consider(j)
                return Refusal.LAGGING
        dialling = self._dialling[j]
        return answer_proposal(
            own=self.nodes.peer[j],
            dialler=self.nodes.peer[i],
            dialling=None if dialling < 0 else self.nodes.peer[dialling],
            exchange_open=self._busy(j),
            too_often=self._visits[j].too_many(self.nodes.peer[i], self.directory.replicas(j) - 1),
            steps_since_outer=self.progress[j].steps_since(0),
            window=self.window,
            last_round=False,
        )

    def _answered(self, i: int, j: int, refusal: str) -> None:
        """A dial came to nothing."""
        if self._dialling[i] != j:
            return
        self._dialling[i] = -1
        self.refusals[refusal] = self.refusals.get(refusal, 0) + 1
        delay = retry_delay(self._step_seconds[i], self.nodes.rng)
        self._next_try[i] = self.agenda.now + delay
        self.agenda.after(delay, self.consider, i)

    def _free(self, i: int, j: int) -> bool:
        """Whether a node was engaged with this one, as it no longer is."""
        if self._engaged[i] != j:
            return False
        self._engaged[i], self.nodes.exchanging[i] = -1, False
        self._free_since[i] = self.progress[i].steps
        return True

    def _give_up(self, i: int, j: int) -> None:
        if self._free(i, j):
            self.consider(i)

    def _catch_up(self, i: int) -> None:
        """Take the state of a stage peer that is too far ahead. The other goes on meanwhile."""
        donor, self._catch_up_from[i] = self._catch_up_from[i], -1
        if not self.nodes.serving[donor] or not self.nodes.reach(i, donor):
            return
        self._taking[i] = True
        seconds = self.nodes.copy_seconds(donor, i, self.nodes.settings.work.state_bytes)
        self.agenda.after(seconds, self._caught_up, i, donor)

    def _caught_up(self, i: int, donor: int) -> None:
        if not self._taking[i]:
            return
        self._taking[i] = False
        self._free_since[i] = self.progress[i].steps
        if self.nodes.serving[donor] and self.nodes.reach(i, donor):
            self.nodes.count("states", self.nodes.settings.work.state_bytes)
            self.copy(donor, i)
            self.kinds["caught_up"] += 1
            self.nodes.tell("caught up", i, donor)
        self.consider(i)

    def _complete(self, i: int, j: int, before_i: Progress, before_j: Progress) -> None:
        """All has come on both sides: what is changed waits for each side's own device."""
        if self._engaged[i] != j or self._engaged[j] != i:
            return
        if not self.nodes.reach(i, j):
            self._free(i, j)
            self._free(j, i)
            return
        self.nodes.count("exchanges", 2.0 * self.nodes.settings.work.exchange_bytes)
        slow, momentum = self.slow[[i, j]], self.momentum[[i, j]]
        mean = contribution(RULE, fast=slow, slow=slow, momentum=momentum).mean(0)
        self.expected[i] = self.expected[j] = (self.expected[i] + self.expected[j]) / 4
        self._visits[j].made(self.nodes.peer[i], self.directory.replicas(j) - 1)
        self.meetings.append(i, j)
        self.nodes.tell("met", i, j)
        shift = 0.5 * (before_j.clock - before_i.clock)
        for one, other, before, by in ((i, j, before_i, shift), (j, i, before_j, -shift)):
            seconds = self.nodes.turn(one)
            self.exchange_seconds += 0.5 * seconds
            self.agenda.after(seconds, self._commit, one, other, mean, before, by)

    def _commit(self, i: int, j: int, mean: torch.Tensor, before: Progress, shift: float) -> None:
        if not self._free(i, j):
            return
        step_(RULE, mean, slow=self.slow[i], momentum=self.momentum[i])
        self._went_on(i, self.progress[i].after_outer_step(0, before, shift))
        self._visits[i].stepped()
        self.kinds["paired"] += 1
        self.consider(i)

    def spread(self) -> tuple[float, float]:
        """Variance of the weights within a stage, a weight and a node, and what the arithmetic expects of the same
        meetings; means over the stages."""
        found: list[tuple[float, float]] = []
        by_stage: dict[int, list[int]] = {}
        for i in np.flatnonzero(self.nodes.serving_row).tolist():
            by_stage.setdefault(self.nodes.stage[i], []).append(i)
        for who in by_stage.values():
            if len(who) > 1:
                rows = self.slow[torch.tensor(who)].double()
                found.append((float(rows.var(dim=0).mean()), math.fsum(self.expected[i] for i in who) / len(who)))
        many = max(1, len(found))
        return math.fsum(one for one, _ in found) / many, math.fsum(other for _, other in found) / many
