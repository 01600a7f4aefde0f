"""What outer steps do to the weights is held against the rule in every hunt: a rule that is broken is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from noloco_node.averaging import session
from noloco_node.outer import replica
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule, step_
from noloco_node.simulator.faults import Schedule
from noloco_node.simulator.hunt import carry_out
from noloco_node.simulator.outer_ledger import OuterEntry, WatchedOuter, strays

QUIET = Schedule(seed=3, replicas=(3,))
"""Pairs average and replicas step alone."""

Step = Callable[..., None]


def sets_all_alike(rule: OuterRule, mean_contribution: Tensor, *, slow: Tensor, momentum: Tensor | None) -> None:
    step_(rule, mean_contribution, slow=slow, momentum=momentum)
    slow.fill_(0.5)


def moves_a_little_more(rule: OuterRule, mean_contribution: Tensor, *, slow: Tensor, momentum: Tensor | None) -> None:
    before = slow.clone()
    step_(rule, mean_contribution, slow=slow, momentum=momentum)
    slow.add_(slow - before, alpha=0.01)


def pulls_too_little(rule: OuterRule, mean_contribution: Tensor, *, slow: Tensor, momentum: Tensor | None) -> None:
    step_(rule, mean_contribution.mul_(0.9), slow=slow, momentum=momentum)


@pytest.mark.parametrize("broken", [sets_all_alike, moves_a_little_more, pulls_too_little])
def test_a_broken_rule_is_seen(broken: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes come to the end all the same: no other invariant looks at weights."""
    monkeypatch.setattr(replica, "step_", broken)
    found = carry_out(QUIET).breaches
    assert found
    assert {line.partition(":")[0] for line in found} == {"weights"}


def test_tokens_that_count_on_one_side_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side trusts its own tokens: together they are more than two."""
    monkeypatch.setattr(session, "token_weights", lambda _: (1.2, 0.8))
    assert any("two together" in line for line in carry_out(QUIET).breaches)


def test_a_difference_that_only_one_side_takes_in_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over the two is moved by what the other does not give."""
    taken = replica.OuterReplica.add_chunk
    times = 0

    def every_other(self: replica.OuterReplica, index: int, wire: Tensor) -> None:
        nonlocal times
        times += 1
        if times % 2:
            taken(self, index, wire)

    monkeypatch.setattr(replica.OuterReplica, "add_chunk", every_other)
    assert any("the mean of two replicas was moved" in line for line in carry_out(QUIET).breaches)


@pytest.mark.parametrize("hostile", [False, True])
def test_weights_that_are_loaded_while_a_step_is_open_are_seen_unless_somebody_ruins_its_own(*, hostile: bool) -> None:
    """Before it counts; what is loaded between two steps is nobody's fault."""
    ledger = list[OuterEntry]()
    rule = OuterRule(alpha=0.5, beta=0.7, gamma=0.9, momentum="averaged")
    outer = WatchedOuter(ledger, OuterReplica(rule, torch.ones(8), codec=CODECS["fp32"], chunk_bytes=64), 64)
    for ruined in (False, True):
        outer.load(torch.ones(8), torch.zeros(8))
        outer.snapshot.copy_(outer.slow).add_(0.1)
        outer.open(members=1, weight=1.0)
        outer.agree(())
        if ruined:
            outer.load(1e3 * torch.ones(8), torch.zeros(8))
        outer.commit()
        found = list(strays(ledger, hostile=hostile))
        assert (found == []) is (hostile or not ruined)
