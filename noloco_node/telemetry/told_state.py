"""A node's state as another process reads it from `/api/state`: bounded, and tolerant of what other versions say."""

from __future__ import annotations

import http.client
import json

from pydantic import BaseModel, ConfigDict, ValidationError

from noloco_node.telemetry.asking import Hangs, ask_page

TOLD_SECONDS = 4.0
MOST_BYTES = 4 << 20
OF_A_SWARM = "nodes_answering"
"""This field of a swarm's state is in no node's."""


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ToldRun(_Told):
    """The run."""

    id: str = ""
    name: str = ""


class ToldPeer(_Told):
    """See `PeerSeen`."""

    peer_id: str
    stage: int
    state: str = ""
    answers: bool = False
    lag: float | None = None
    tokens_per_second: float | None = None
    tokens: int = 0
    under_way: int = 0
    load: int | None = None
    name: str = ""


class ToldLine(_Told):
    """A line of the log, or a warning."""

    time: float
    text: str
    level: str = ""


class ToldDownload(_Told):
    """A stage peer's state that is copied: bytes, and seconds since the copy began."""

    received: int
    total: int
    donor: str = ""
    seconds: float = 0.0


class ToldExchange(_Told):
    """An outer step that was committed; `partner` is None where it was taken alone."""

    partner: str | None = None


class ToldTraffic(_Told):
    """Bytes by kind since the node was started; the rest of its contribution is not read."""

    bytes_sent: dict[str, int] = {}
    bytes_received: dict[str, int] = {}


class ToldState(_Told):
    """See `NodeState.document`. Times are wall times of the node, speeds tokens per second."""

    time: float
    state: str
    detail: str
    since: float
    version: str = ""
    peer_id: str | None = None
    run: ToldRun | None = None
    stage: int | None = None
    stages: int | None = None
    clock: float | None = None
    target: int | None = None
    seconds_left: float | None = None
    tokens_per_second: float | None = None
    swarm_tokens_per_second: float | None = None
    training_loss: float | None = None
    validation_loss: float | None = None
    spread: float | None = None
    learning_rate: float | None = None
    inner_steps: int | None = None
    outer_rounds: int | None = None
    outer_steps: dict[str, int] = {}
    """By kind, aborted ones among them."""
    exchanges: tuple[ToldExchange, ...] = ()
    download: ToldDownload | None = None
    contribution: ToldTraffic | None = None
    uptime_seconds: float = 0.0
    in_hand: int = 0
    nodes_per_stage: tuple[int, ...] = ()
    missing_stages: tuple[int, ...] = ()
    peers: tuple[ToldPeer, ...] = ()
    warnings: tuple[ToldLine, ...] = ()
    log: tuple[ToldLine, ...] = ()


class NoState(Exception):
    """Nobody told a node's state; the text says why."""


class ShowsSwarm(NoState):
    """What answers is a seed: it shows a whole swarm, and is no node itself."""


class NodeHangs(NoState):
    """Something listens there, and does not answer."""


def ask_state(host: str, port: int) -> ToldState:
    """The state of the node whose pages are there. Raises NoState."""
    try:
        status, body = ask_page(host, port, "/api/state", seconds=TOLD_SECONDS, most_bytes=MOST_BYTES)
    except Hangs as error:
        raise NodeHangs(str(error)) from None
    except TimeoutError:
        raise NoState("no answer in time") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoState(str(error) or type(error).__name__) from None
    if status != http.client.OK:
        raise NoState(f"what answers there is no page of a node: status {status}")
    try:
        told: object = json.loads(body)
        if isinstance(told, dict) and OF_A_SWARM in told:
            raise ShowsSwarm("a seed answers there, which shows a whole swarm and trains no stage")
        return ToldState.model_validate(told)
    except (ValidationError, ValueError, RecursionError):
        raise NoState("what answers there is no state of a node") from None
