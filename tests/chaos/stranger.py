"""One stranger with a plan: one connection at a time, as many throw-away keys as it likes, all its attacks at once.

A key's life ends when most of the victims have banned it, or after a while; then comes the next one. What became of
every attack stands in a file. Run as `python -m tests.chaos.stranger --config FILE --victims FILE ...`; begins with the
first line of its standard input and ends with its end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from hivemind.proto import dht_pb2

from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.validator import RecordValidator, unpack_dictionary
from noloco_node.errors import UserError
from tests.chaos.attacks import ATTACKS
from tests.chaos.attacks.life import BROKEN, LOST, Life, Tally, digest_of, living, read_victims
from tests.chaos.paced_node import READY

messages: Any = dht_pb2
LOOK_SECONDS = 1.0
CLOCK_SECONDS = 5.0
LIVES = "lives"
KEYS = "keys of: "
"""Before the name of an attack: the peer ids of the lives that carry it out."""
TURNS = (
    frozenset({"bad answers to exchanges"}),
    frozenset({"exchanges of NaN", "abandoned proposals", "malformed requests"}),
    frozenset({"lying clocks"}),
)
"""Attacks that would spoil each other under one key: each life carries out the others and one of these sets. The
patient one comes first. Nobody dials a newcomer for some inner steps, the second set is banned before that, and a peer
with a clock beyond belief is no partner at all."""


async def haunt(life: Life, names: list[str], seconds: float) -> None:
    """Carry these attacks out at once for one life."""
    tasks = [asyncio.create_task(_carried_out(name, life)) for name in names]
    tasks += [asyncio.create_task(_keep_time(life)), asyncio.create_task(_write_often(life.tally))]
    try:
        async with asyncio.timeout(seconds):
            await life.shut_out.wait()
        life.tally.count(LIVES, "shut out")
    except TimeoutError:
        life.tally.count(LIVES, "ended by itself")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carried_out(name: str, life: Life) -> None:
    while True:
        try:
            await ATTACKS[name](life)
        except Exception:  # noqa: BLE001 - an attack that fails must be seen, and must not end the others
            traceback.print_exc()
            life.tally.count(name, BROKEN)
            await asyncio.sleep(LOOK_SECONDS)


async def _write_often(tally: Tally) -> None:
    while True:
        tally.write()
        await asyncio.sleep(LOOK_SECONDS)


async def _keep_time(life: Life) -> None:
    """Let `life.clock` be what the honest nodes' records say."""
    validator = RecordValidator(life.spec.run_id, life.spec.stages)
    honest = {victim.peer for victim in life.victims}
    while True:
        clocks: list[float] = []
        for stage in range(life.spec.stages):
            victim = life.rng.choice(life.victims)
            request = messages.FindRequest(keys=[digest_of(life.key(stage))])
            answer = await life.rpc("looks", victim.peer, "rpc_find", request, messages.FindResponse)
            clocks += [] if answer is None else _clocks(validator, request.keys[0], answer, honest)
        if clocks:
            life.clock = statistics.median(clocks)
            life.tally.count("looks", "records read", len(clocks))
        await asyncio.sleep(CLOCK_SECONDS)


def _clocks(validator: RecordValidator, key: bytes, answer: Any, honest: set[Any]) -> list[float]:
    found: list[float] = []
    if not answer.results or answer.results[0].type != messages.FOUND_DICTIONARY:
        return found
    for signer, signed, until in unpack_dictionary(answer.results[0].value):
        if isinstance(signer, str) and isinstance(signed, bytes) and isinstance(until, float):
            record = validator.read(key, signer, signed, until)
            if record is not None and record.peer_id in honest:
                found.append(record.clock)
    return found


async def _live_again_and_again(spec: RunSpec, arguments: argparse.Namespace) -> None:
    rng, tally = random.Random(arguments.seed), Tally(arguments.folder / "attacks.json")
    torch.set_num_threads(1)
    names = arguments.attacks.split(",") if arguments.attacks else list(ATTACKS)
    for turn in itertools.cycle(TURNS):
        now = [name for name in names if name in turn or not any(name in other for other in TURNS)]
        try:
            async with living(spec, read_victims(arguments.victims), arguments.folder, tally, rng) as life:
                for name in now:
                    tally.count(KEYS + name, life.identity.peer_id)
                await haunt(life, now, arguments.life_seconds)
        except UserError as error:
            tally.count(LIVES, LOST)
            print(f"this life did not begin: {error}", flush=True)
            await asyncio.sleep(LOOK_SECONDS)


async def _main(spec: RunSpec, arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    print(READY, flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    work = asyncio.create_task(_live_again_and_again(spec, arguments))
    ended = loop.run_in_executor(None, sys.stdin.read)
    await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def main() -> None:
    """Until the end of standard input."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.stranger", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--victims", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--attacks", default="", help=f"of {', '.join(ATTACKS)}; all if none is named")
    parser.add_argument("--life-seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_main(load_config(arguments.config, arguments.overrides).run, arguments))


if __name__ == "__main__":
    main()
