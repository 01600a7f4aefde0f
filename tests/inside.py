"""What tests see of objects beyond their public names, each in one place: a change of it is made here.

What a test replaces by something that fails or lies it still names itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, cast

from noloco_node.directory.membership import Membership
from noloco_node.directory.records import Directory
from noloco_node.libp2p.relay_server import CircuitRelay
from noloco_node.peers.hop import UNBLEMISHED
from noloco_node.pipeline.server import Repeats
from noloco_node.training.compute_thread import Compute
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.interface import Transport


def desk_of(transport: Transport) -> Any:
    """Where a transport's requests are admitted."""
    return transport


def served_by(transport: Transport) -> dict[str, Any]:
    """Each method that a transport serves, by its name, to be answered otherwise."""
    return desk_of(transport)._methods


def incoming_streams_of(transport: Transport) -> int:
    """Streams that peers hold open to a node."""
    return cast("Any", transport)._incoming.total()


def thread_of(worker: StageWorker) -> Compute:
    """What computes for a worker."""
    return cast("Any", worker)._thread


def directory_of(membership: Membership) -> Directory:
    """The place where a replica reads the directory."""
    return cast("Any", membership)._directory


def node_of(directory: object) -> Any:
    """A directory's part in the DHT."""
    return cast("Any", directory)._node


def walker_of(directory: object) -> Any:
    """What asks for a directory's keys."""
    return cast("Any", directory)._walker


def intake_of(directory: object) -> Any:
    """What judges the records that a directory is brought."""
    return cast("Any", directory)._intake


def records_of(directory: object) -> Any:
    """What a directory holds."""
    return cast("Any", directory)._records


def sampled_of(directory: object) -> Any:
    """What a directory makes of the keys that it reads."""
    return cast("Any", directory)._sampled


def level_of(sampled: object, stage: int) -> Any:
    """What is known of a stage's buckets."""
    return cast("Any", sampled)._stages[stage].level


def rows_of(store: object) -> Mapping[Any, Any]:
    """Key -> signer -> what is held of it."""
    return cast("Any", store)._rows


def held_by(relay: CircuitRelay) -> dict[Any, float]:
    """The peers that have a place with a relay, and until when."""
    return cast("Any", relay)._places


def handshakes_of(relay: CircuitRelay) -> Mapping[Any, int]:
    """Callers whose request a relay reads, and how many of each."""
    return cast("Any", relay)._handshakes


def repeats_of(server: object) -> Repeats:
    """What a replica knows of microbatches that it has seen."""
    return cast("Any", server)._repeats


def remembered(repeats: Repeats) -> tuple[Sized, Sized, Any]:
    """Microbatches that were trained, answers that are kept, ids by how many have them."""
    inner = cast("Any", repeats)
    return inner._trained, inner._answers, inner._ids


def reputes_of(book: object) -> Mapping[Any, Any]:
    """What audits have said, by peer."""
    known = cast("Any", book).cards
    hops = ((peer, known.of(peer).hop) for peer in (*known.workers, *known.met))
    return {peer: hop.repute for peer, hop in hops if hop is not None and hop.repute != UNBLEMISHED}


def audits_under_way(auditor: object) -> Sized:
    """The audits of an auditor that are under way."""
    return cast("Any", auditor)._at_work


def optimizer_of(trainer: object) -> Any:
    """What steps a stage's parameters."""
    return cast("Any", trainer)._optimizer.torch
