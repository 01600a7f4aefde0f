"""The books of a node as one event: what it trained, served, refused, sent and received so far."""

from __future__ import annotations

from collections.abc import Mapping

from noloco_node.swarm.membership import Membership
from noloco_node.swarm.microbatch import Ledger
from noloco_node.swarm.transport import Transport
from noloco_node.telemetry.events import Account
from noloco_node.training.progress import Progress


def account_of(
    progress: Progress,
    ledger: Ledger,
    transport: Transport,
    membership: Membership,
    *,
    target: int,
    held: int,
    loop_lag_seconds: float,
    busy_seconds: float,
) -> Account:
    """The account of this moment; `held` are samples drawn and neither trained nor dropped."""
    traffic = transport.traffic
    return Account(
        clock=progress.clock,
        target=target,
        tokens=progress.tokens,
        drawn=ledger.drawn,
        trained=ledger.trained,
        dropped=ledger.dropped,
        held_at_end=held,
        put_back=ledger.put_back,
        retried=ledger.retried,
        repeated=ledger.repeated,
        served=ledger.served,
        refused={reason.value: count for reason, count in transport.refusals_given.items()},
        bytes_sent=bytes_by_kind(traffic.sent),
        bytes_received=bytes_by_kind(traffic.received),
        nodes_per_stage=membership.nodes_per_stage(),
        loop_lag_seconds=loop_lag_seconds,
        busy_seconds=busy_seconds,
    )


def bytes_by_kind(by_method: Mapping[str, int]) -> dict[str, int]:
    """Traffic by what it carries instead of by method: microbatches, exchange, state, other."""
    kinds = {"microbatch": "microbatches", "outer": "exchange", "state": "state"}
    totals: dict[str, int] = {}
    for method, count in by_method.items():
        kind = kinds.get(method.split(".")[0], "other")
        totals[kind] = totals.get(kind, 0) + count
    return totals
