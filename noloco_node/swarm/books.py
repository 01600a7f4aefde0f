"""The books of a node as one event: what it trained, served, refused, sent and received so far."""

from __future__ import annotations

from collections.abc import Mapping

from noloco_node.swarm.membership import Membership
from noloco_node.swarm.microbatch import Ledger
from noloco_node.swarm.transport import Transport
from noloco_node.telemetry.events import Account, Strangers, bytes_by_kind
from noloco_node.training.progress import Progress


def account_of(
    progress: Progress,
    ledger: Ledger,
    transport: Transport,
    membership: Membership,
    *,
    target: int,
    held: int,
    missing_stages: list[int],
    loop_lag_seconds: float,
    busy_seconds: float,
    bounded: Mapping[str, int],
) -> Account:
    """The account of this moment; `held` are samples drawn and neither trained nor dropped, `bounded` counts what
    strangers sent too large, by kind."""
    traffic, conduct = transport.traffic, transport.conduct
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
        missing_stages=missing_stages,
        loop_lag_seconds=loop_lag_seconds,
        busy_seconds=busy_seconds,
        strangers=Strangers(
            offences=dict(conduct.offences),
            bans=dict(conduct.bans),
            banned_now=conduct.banned_now,
            bounded=dict(bounded),
        ),
    )
