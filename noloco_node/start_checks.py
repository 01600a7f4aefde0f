"""What a node checks of itself on its way into a swarm: said in a line each, and an end where one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.checks import (
    Check,
    Outcome,
    check_clock,
    check_disk,
    check_files,
    check_memory,
    check_versions,
    first_failure,
    free_disk,
    memory,
    raise_file_limit,
)
from noloco_node.config.run_spec import RunSpec
from noloco_node.preflight import plan_run
from noloco_node.storage.run_folder import RunFolder
from noloco_node.swarm.hello import Measured, measure_hello
from noloco_node.swarm.peer_addresses import parse_address
from noloco_node.swarm.transport import Transport

logger = logging.getLogger(__name__)


def before_the_network() -> list[Check]:
    """Of the process: it takes as many open files as it may."""
    return [check_files(raise_file_limit())]


async def among_peers(transport: Transport, joined: Sequence[str]) -> list[Check]:
    """Of this node against the peers at these addresses: clock and versions."""
    answers = await asyncio.gather(*(measure_hello(transport, parse_address(text).peer) for text in joined))
    return judge_peers({text: answer for text, answer in zip(joined, answers, strict=True) if answer is not None})


def judge_peers(answers: dict[str, Measured]) -> list[Check]:
    """Clock and versions against the answers of peers, by address."""
    skews = [(answer.skew, answer.doubt) for answer in answers.values() if answer.skew is not None]
    versions = {text: (answer.hello.protocol, answer.hello.version) for text, answer in answers.items()}
    return [check_clock(skews), check_versions((PROTOCOL_VERSION, __version__), versions)]


def for_a_stage(spec: RunSpec, stage: int, folder: RunFolder) -> list[Check]:
    """Of the machine, for the stage that it will serve: disk and memory. Loads transformers."""
    parameters = plan_run(spec).stage_parameters[stage]
    available, total = memory()
    return [
        check_disk(free_disk(folder.path), parameters, str(folder.path)),
        check_memory(available, total, parameters),
    ]


def report(checks: Sequence[Check]) -> None:
    """Log what was found. UserError (CHECK_FAILED) where a check failed."""
    for check in checks:
        if check.outcome is Outcome.WARN:
            logger.warning("%s: %s; %s", check.name, check.found, check.remedy)
        else:
            logger.info("checked %s: %s", check.name, check.found)
    failure = first_failure(checks)
    if failure is not None:
        raise failure
