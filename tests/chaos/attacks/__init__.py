"""What one stranger can do to a swarm, each attack by itself: a coroutine that goes on until it is cancelled.

An attack takes a `Life` (`life.py`): one connection under one throw-away key. It counts what came of each try, so that
its user can tell a defence that refused from an attack that never fired. `records.py`: what is stored in the directory
and what is said of it. `visits.py`: what is asked of honest nodes, and exchanges that are held. `services.py`: what
honest nodes are answered. `hoards.py`: streams that are held open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tests.chaos.attacks import hoards, records, services, visits
from tests.chaos.attacks.life import Life

Attack = Callable[[Life], Awaitable[None]]

ATTACKS: Mapping[str, Attack] = {
    "invented node ids": records.invented_node_ids,
    "endless records": records.endless_records,
    "subkeys by the thousand": records.many_subkeys,
    "crowd of ghosts": records.crowd,
    **{name: partial(records.ghosts, name) for name in records.GHOSTS},
    "replayed records": records.replayed,
    "lying finds": records.lying_finds,
    "told ghosts": visits.told_ghosts,
    "a place in every stage": services.announce,
    "garbled copies": services.garbled_copies,
    "bad answers to exchanges": services.bad_exchange_answers,
    "dripping donor": services.dripping_donor,
    "hostile copies of a stage": services.hostile_copies,
    "exchanges of NaN": visits.nan_exchanges,
    "lying clocks": visits.lying_clocks,
    "abandoned proposals": visits.abandoned_proposals,
    "dripping exchanges": visits.dripping_exchanges,
    "random labels": visits.random_labels,
    "endless evaluations": visits.endless_evaluations,
    "malformed requests": visits.malformed_requests,
    "300 streams": hoards.streams,
}
