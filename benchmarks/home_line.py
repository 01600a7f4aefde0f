"""A run of the consumer files at home, on a scale that this machine bears: `benchmarks.utilisation --config NAME`.

Two stages × four daemons with the file's own settings train a model of a quarter of its width. Bytes shrink and
time is stretched by factors that keep the ratio of line, round trip and device: a paced device holds a microbatch for
as long as the planner gives the real device, times the stretch. An outer step keeps its share of a microbatch's bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.other_process import cpu_seconds
from benchmarks.shaped_links import Uplink
from benchmarks.utilisation import first_stage, last_account, shaped_swarm
from benchmarks.virtual import VirtualSwarm
from noloco_node.config.load import Config, load_config
from noloco_node.config.run_spec import ActivationCodec
from noloco_node.model.cut import build_config
from noloco_node.simulator.report import table_of
from noloco_node.sizing.advice import expect, loads_of, step_microbatches
from noloco_node.sizing.devices import Device
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.utilisation import Link, StageLoad, UtilisationOutlook, outlook_of
from noloco_node.telemetry.events import Account
from noloco_node.training.compute_thread import Priority
from tests.chaos.swarm import Swarm

REPLICAS = 4
WIDTH_PART = 4
"""Hidden size and rank are this part of the file's, so that their ratio stays."""
WINDOW_TOKENS = 256
STEP_MICROBATCHES = 16
"""Of a replica behind an inner step; twice as many as are under way."""
OUTER_CODEC = "fp16"
"""The few weights of a small model are sent so widely that an outer step takes far longer than a round trip."""
FORWARD_PART = 0.25
"""Of the work of a stage that makes its layers' graphs anew for the backward: forward, forward again, backward."""
CHUNK_BYTES = 1 << 16
"""Of weights on the wire, a sixteenth of what runs have, as a microbatch has about a fifteenth of its bytes."""
HELD_SECONDS = 0.1
"""Of the real line, that a connection's buffer holds before it."""
PACKET_BYTES = 1448
START_SECONDS = 400.0
WINDOWS = 4
"""Parts of the measured time, of which the range is told."""
SMALL = (
    "run.model.layers_per_stage=[3,1]",
    "run.model.config.num_hidden_layers=4",
    "run.model.config.vocab_size=256",
    "run.model.config.intermediate_size=64",
    "run.model.config.num_attention_heads=2",
    "run.model.config.num_key_value_heads=1",
    "run.model.config.head_dim=16",
    f"run.model.config.max_position_embeddings={WINDOW_TOKENS}",
    "run.data.source=stdlib",
    "run.data.path=null",
    "run.data.streaming=false",
    "run.data.tokenizer=bytes",
    "run.data.holdout=0.01",
    f"run.data.sequence_length={WINDOW_TOKENS}",
    "run.inner.precision=fp32",
    "run.inner.backward=keep",
    "run.evaluation.windows=2",
    "run.standby_copies=0",
    f"run.limits.chunk_bytes={CHUNK_BYTES}",
    f"run.outer.codec={OUTER_CODEC}",
    f"local_swarm.replicas={REPLICAS}",
)
PLAIN = ("run.model.subspace_rank=null", "run.model.subspace_last_stage_free=false")


@dataclass(frozen=True)
class Home:
    """One line of the table: the file on real devices and lines, and its scaled likeness."""

    config: Path
    plain: ActivationCodec | None
    """The codec of activations without a subspace; None for the file's own settings."""
    link: Link
    flop_per_second: float
    stretch: float
    """Seconds here for one second there."""

    @property
    def name(self) -> str:
        """As the table has it."""
        return "as the file has it" if self.plain is None else f"{self.plain}, no subspace"

    @property
    def own(self) -> tuple[str, ...]:
        """What differs from the file."""
        return () if self.plain is None else (*PLAIN, f"run.pipeline.activations=[{self.plain}]")

    @cached_property
    def full(self) -> Config:
        """At full size."""
        return load_config(self.config, self.own)

    @cached_property
    def as_filed(self) -> Home:
        """The file as it stands: it sets the scale."""
        return self if self.plain is None else replace(self, plain=None)

    @cached_property
    def full_footprint(self) -> Footprint:
        """Of the full size."""
        return footprint_of(self.full.run)

    @cached_property
    def footprint(self) -> Footprint:
        """Of the scaled run."""
        return footprint_of(load_config(self.config, self.overrides).run)

    @cached_property
    def full_loads(self) -> list[StageLoad]:
        """What a microbatch asks of the real devices and lines."""
        return loads_of(self.full, self.full_footprint, self.flop_per_second, step_microbatches(self.full))

    @cached_property
    def small_loads(self) -> list[StageLoad]:
        """The bytes of the scaled run; its seconds are of no device."""
        config = load_config(self.config, self.overrides)
        return loads_of(config, self.footprint, 1.0, STEP_MICROBATCHES)

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """Of the scaled run, but for H."""
        file = load_config(self.config).run
        hidden = int(build_config(file.model).hidden_size) // WIDTH_PART
        small = (*SMALL, f"run.model.config.hidden_size={hidden}")
        if file.model.subspace_rank is not None and self.plain is None:
            small += (f"run.model.subspace_rank={file.model.subspace_rank // WIDTH_PART}",)
        tokens = STEP_MICROBATCHES * REPLICAS * WINDOW_TOKENS * file.inner.microbatch_windows
        pipeline, limits = file.pipeline, file.limits
        return (
            *small,
            *self.own,
            *(() if self.plain is None else (f"node.uplink_mbit={8e-6 * self.line.uplink:.4f}",)),
            f"run.inner.global_batch_tokens={tokens}",
            f"run.pipeline.budget_seconds={self.stretch * pipeline.budget_seconds:g}",
            f"run.pipeline.progress_seconds={self.stretch * pipeline.progress_seconds:g}",
            f"run.limits.exchange_progress_seconds={self.stretch * limits.exchange_progress_seconds:g}",
            f"run.limits.record_seconds={self.stretch * limits.record_seconds:g}",
        )

    @cached_property
    def scaled(self) -> Config:
        """The scaled run, with as many inner steps between outer steps as keep an outer step's share of the bytes."""
        return load_config(self.config, (*self.overrides, *self.steps))

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The setting of H: an outer step keeps its share of the bytes of the file as it stands."""
        file = self.as_filed
        full = outer_share(file.full_loads, file.full.run.outer.inner_steps * step_microbatches(file.full))
        return (f"run.outer.inner_steps={max(1, round(outer_share(file.small_loads, STEP_MICROBATCHES) / full))}",)

    @cached_property
    def line(self) -> Link:
        """The scaled one: a microbatch of the file as it stands takes as long of it, times the stretch."""
        file = self.as_filed
        part = sum(file.small_loads[0].sends) / sum(file.full_loads[0].sends)
        return Link(self.link.uplink * part / self.stretch, self.link.round_trip * self.stretch)

    @cached_property
    def loads(self) -> list[StageLoad]:
        """What a microbatch asks of the paced devices and scaled lines."""
        return [
            replace(small, compute_seconds=self.stretch * full.compute_seconds)
            for full, small in zip(self.full_loads, self.small_loads, strict=True)
        ]

    @property
    def operations(self) -> list[str]:
        """Of each stage's paced device: a forward and a backward; the last stage does both in one."""
        first, last = (load.compute_seconds for load in self.loads)
        return [f"{FORWARD_PART * first:.4f},{(1 - FORWARD_PART) * first:.4f}", f"{last:.4f}"]

    def planned(self) -> UtilisationOutlook:
        """What the planner says of the scaled figures."""
        in_flight = self.scaled.node.in_flight
        assert in_flight != "auto", "the consumer files name a number"
        steps = self.scaled.run.outer.inner_steps
        return outlook_of(self.loads, self.line, in_flight=in_flight, h=steps, step_microbatches=STEP_MICROBATCHES)

    def planned_in_full(self) -> UtilisationOutlook:
        """What it says of the real ones, as `config validate` prints it."""
        return expect(self.full, self.link, Device("the real one", self.flop_per_second, None)).outlook


def outer_share(loads: Sequence[StageLoad], between: int) -> float:
    """Bytes of outer steps for each byte of a microbatch, where that is most; so many microbatches are between two."""
    return max(load.outer_bytes / between / sum(load.sends) for load in loads)


async def measured(home: Home, settle: float, seconds: float) -> dict[str, Any]:
    """Shares of the devices, tokens a second, bytes and processor of daemons that train so."""
    layout = (0, 1) * REPLICAS
    held = int(HELD_SECONDS * home.stretch * home.line.uplink)
    delay = home.line.round_trip / 2
    uplinks = [Uplink(home.line.uplink, delay, piece_bytes=PACKET_BYTES, held_bytes=held) for _ in layout]
    overrides = (*home.overrides, *home.steps, "run.inner.target_tokens=1_000_000_000")
    async with shaped_swarm(layout, overrides, uplinks, home.operations, home.config, home.stretch) as (
        swarm,
        unshaped,
    ):
        started = time.monotonic()
        await swarm.until(lambda: _all_train(swarm), START_SECONDS, "each replica has trained a microbatch")
        await swarm.rest(settle)
        marks = [_Mark(swarm, uplinks)]
        for _ in range(WINDOWS):
            await swarm.rest(seconds / WINDOWS, 60.0)
            marks.append(_Mark(swarm, uplinks))
        unshaped_bytes = unshaped.sent
        settled = marks[0].at - started
    first, last = marks[0], marks[-1]
    took = last.at - first.at
    loads = [load.compute_seconds for load in home.loads]
    per_window = [_shares(before, after, 0, loads) for before, after in pairwise(marks)]
    trained = sum(_grown(first, last, 0, "trained"))
    tokens = trained * home.full.run.microbatch_tokens * home.stretch / took
    kinds = {kind for account in last.accounts for kind in account.bytes_sent}
    return {
        "device_share": fmean(_shares(first, last, 0, loads)),
        "last_stage_share": fmean(_shares(first, last, 1, loads)),
        "busy_share": fmean(_busy(first, last, 0)),
        "share_of_windows": [fmean(each) for each in per_window],
        "share_of_nodes": _shares(first, last, 0, loads),
        "tokens_per_second": tokens,
        "microbatches": trained,
        "inner_steps": trained / REPLICAS / STEP_MICROBATCHES,
        "line_share": [
            (after - before) / took / home.line.uplink for before, after in zip(first.sent, last.sent, strict=True)
        ],
        "sent_by_kind": {
            kind: sum(
                after.bytes_sent.get(kind, 0) - before.bytes_sent.get(kind, 0)
                for before, after in zip(first.accounts, last.accounts, strict=True)
            )
            for kind in sorted(kinds)
        },
        "requeued": sum(_grown(first, last, 0, "requeued")),
        "retried": sum(_grown(first, last, 0, "retried")),
        "served": sum(_grown(first, last, 1, "served")),
        "refused": [account.refused for account in last.accounts],
        "passed_unshaped": unshaped_bytes,
        "cpu_share": (last.cpu - first.cpu) / took / (os.cpu_count() or 1),
        "machine_cpu_share": 1.0 - (last.idle - first.idle) / took / (os.cpu_count() or 1),
        "settled_seconds": settled,
        "seconds": took,
        "load": os.getloadavg()[0],
    }


def simulated(home: Home, settle: float, seconds: float, seed: int) -> float:
    """The share of the first stage's devices of the same swarm in virtual time, by the microbatches that it trained.
    Its lines are shared as the daemons' are; what its processor takes is nothing."""
    first, last = (load.compute_seconds for load in home.loads)

    def operation(stage: int, work: Priority) -> float:
        return last if stage > 0 else first * (1 - FORWARD_PART if work is Priority.BACKWARD else FORWARD_PART)

    swarm = VirtualSwarm(
        config=load_config(home.config, (*home.overrides, *home.steps, "run.inner.target_tokens=1_000_000_000")),
        layout=(0, 1) * REPLICAS,
        operation=operation,
        uplink=home.line.uplink,
        round_trip=home.line.round_trip,
    )
    pairs = zip(*swarm.watched(partial(first_stage, settle=settle, seconds=seconds), seed), strict=True)
    return fmean((now.trained - then.trained) * first / (now.time - then.time) for then, now in pairs)


def _all_train(swarm: Swarm) -> bool:
    """Each node has written its books, and those of the first stage have trained."""
    books = [[event for event in node.events if isinstance(event, Account)] for node in swarm.nodes]
    pairs = zip(swarm.nodes, books, strict=True)
    return all(own and (node.stage > 0 or own[-1].trained > 0) for node, own in pairs)


class _Mark:
    """The books of all nodes at a moment."""

    def __init__(self, swarm: Swarm, uplinks: Sequence[Uplink]) -> None:
        swarm.read_events()
        self.at = time.monotonic()
        self.accounts: list[Account] = [last_account(node.events) for node in swarm.nodes]
        self.stages = [node.stage for node in swarm.nodes]
        self.sent = [uplink.sent for uplink in uplinks]
        self.cpu = sum(cpu_seconds(node.pid) for node in swarm.nodes)
        self.cpu += sum(psutil.Process().cpu_times()[:2])
        times = psutil.cpu_times()
        self.idle = times.idle + times.iowait


def _pairs(first: _Mark, last: _Mark, stage: int) -> list[tuple[Account, Account]]:
    pairs = zip(first.accounts, last.accounts, first.stages, strict=True)
    return [(before, after) for before, after, own in pairs if own == stage]


def _grown(first: _Mark, last: _Mark, stage: int, what: str) -> list[int]:
    return [getattr(after, what) - getattr(before, what) for before, after in _pairs(first, last, stage)]


def _shares(first: _Mark, last: _Mark, stage: int, seconds: Sequence[float]) -> list[float]:
    """Of the time, that each device of a stage worked: by what a microbatch takes of it. What a busy machine adds to
    that is no work of a device's."""
    done = _grown(first, last, stage, "served" if stage else "trained")
    return [count * seconds[stage] / (last.at - first.at) for count in done]


def _busy(first: _Mark, last: _Mark, stage: int) -> list[float]:
    """Of the time, that each compute thread was held."""
    return [
        (after.busy_seconds - before.busy_seconds) / (after.time - before.time)
        for before, after in _pairs(first, last, stage)
    ]


def row_of(home: Home, found: dict[str, Any]) -> dict[str, Any]:
    """One line: planned at full size, planned as scaled, and measured or simulated."""
    plan = home.planned()
    row: dict[str, Any] = {
        "name": home.name,
        "stretch": home.stretch,
        "mbit": 8e-6 * home.line.uplink,
        "round_trip": home.line.round_trip,
        "overrides": [*home.overrides, *home.steps],
        "operations": home.operations,
        "microbatch_bytes": [list(load.sends) for load in home.loads],
        "outer_bytes": [load.outer_bytes for load in home.loads],
        "planned_in_full": home.planned_in_full().share,
        "planned": plan.device_share[0],
        "planned_uplink": list(plan.uplink_share),
        "limit": plan.limit,
    }
    return {**row, **found, "ratio": found["device_share"] / row["planned"]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each, with the range over the parts of the measured time."""
    found = "simulated" if rows and "simulated" in rows[0] else "measured"
    head = ["activations", "planned at full size", "planned", f"{found} (parts of the time)", f"{found} / planned"]
    return table_of([[*head, "tokens/s of four replicas", "CPU of the swarm", "of the machine"], *map(_cells, rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], f"{row['planned_in_full']:.3f}", f"{row['planned']:.3f}"]
    if "simulated" in row:
        runs = ", ".join(f"{share:.3f}" for share in row["simulated"])
        return [*cells, f"{row['device_share']:.3f} ({runs})", f"{row['ratio']:.2f}", *["–"] * 3]
    parts = sorted(row["share_of_windows"])
    return [
        *cells,
        f"{row['device_share']:.3f} ({parts[0]:.3f}, {median(parts):.3f}, {parts[-1]:.3f})",
        f"{row['ratio']:.2f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['cpu_share']:.0%}",
        f"{row['machine_cpu_share']:.0%}",
    ]
