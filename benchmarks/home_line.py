"""A run of the consumer files at home, on a scale that this machine bears: `benchmarks.utilisation --config NAME`.

Two stages × four daemons with the file's own settings train a model of an eighth of its width. Bytes shrink and
time is stretched by factors that keep the ratio of line, round trip and device: a paced device holds a microbatch for
as long as the planner gives the real device, times the stretch. An outer step keeps its share of a microbatch's bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.shaped_links import Uplink
from benchmarks.utilisation import last_account, shaped_swarm
from noloco_node.config.load import Config, load_config
from noloco_node.config.run_spec import ActivationCodec
from noloco_node.simulator.report import table_of
from noloco_node.sizing.advice import loads_of, outlook_on, step_microbatches
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.utilisation import Link, StageLoad, UtilisationOutlook, outlook_of
from noloco_node.telemetry.events import Account
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
PACKET_BYTES = 1448
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
    "run.guard_copies=0",
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
    def full_loads(self) -> list[StageLoad]:
        """What a microbatch asks of the real devices and lines."""
        return loads_of(self.full.run, footprint_of(self.full.run), self.flop_per_second, step_microbatches(self.full))

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """Of the scaled run. The file as it stands sets the scale, also of the lines without its subspace."""
        file = load_config(self.config).run
        small = (*SMALL, f"run.model.config.hidden_size={int(file.model.config['hidden_size']) // WIDTH_PART}")
        if file.model.subspace_rank is not None and self.plain is None:
            small += (f"run.model.subspace_rank={file.model.subspace_rank // WIDTH_PART}",)
        tokens = STEP_MICROBATCHES * REPLICAS * WINDOW_TOKENS * file.inner.microbatch_windows
        pipeline, limits = file.pipeline, file.limits
        return (
            *small,
            *self.own,
            f"run.inner.global_batch_tokens={tokens}",
            f"run.pipeline.budget_seconds={self.stretch * pipeline.budget_seconds:g}",
            f"run.pipeline.progress_seconds={self.stretch * pipeline.progress_seconds:g}",
            f"run.limits.exchange_progress_seconds={self.stretch * limits.exchange_progress_seconds:g}",
        )

    @cached_property
    def scaled(self) -> Config:
        """The scaled run, with as many inner steps between outer steps as keep an outer step's share of the bytes."""
        return load_config(self.config, (*self.overrides, *self.steps))

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The setting of H: chosen by the file as it stands."""
        as_filed = Home(self.config, None, self.link, self.flop_per_second, self.stretch)
        full = outer_share(as_filed.full_loads, as_filed.full)
        config = load_config(self.config, (*as_filed.overrides, "run.outer.inner_steps=1"))
        loads = loads_of(config.run, footprint_of(config.run), 1.0, STEP_MICROBATCHES)
        return (f"run.outer.inner_steps={max(1, round(outer_share(loads, config) / full))}",)

    @cached_property
    def line(self) -> Link:
        """The scaled one: a microbatch of the file as it stands takes as long of it, times the stretch."""
        as_filed = Home(self.config, None, self.link, self.flop_per_second, self.stretch)
        config = as_filed.scaled
        small = loads_of(config.run, footprint_of(config.run), 1.0, STEP_MICROBATCHES)
        part = sum(small[0].sends) / sum(as_filed.full_loads[0].sends)
        return Link(self.link.uplink * part / self.stretch, self.link.round_trip * self.stretch)

    @cached_property
    def loads(self) -> list[StageLoad]:
        """What a microbatch asks of the paced devices and scaled lines."""
        small = loads_of(self.scaled.run, footprint_of(self.scaled.run), 1.0, STEP_MICROBATCHES)
        return [
            StageLoad(self.stretch * full.compute_seconds, own.sends, own.outer_bytes, own.outer_arithmetic)
            for full, own in zip(self.full_loads, small, strict=True)
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
        return outlook_on(self.full, footprint_of(self.full.run), self.link, self.flop_per_second)


def outer_share(loads: Sequence[StageLoad], config: Config) -> float:
    """Bytes of outer steps for each byte of a microbatch, where that is most."""
    between = config.run.outer.inner_steps * step_microbatches(config)
    return max(load.outer_bytes / between / sum(load.sends) for load in loads)


async def measured(home: Home, settle: float, seconds: float) -> dict[str, Any]:
    """Shares of the devices, tokens a second, bytes and processor of daemons that train so."""
    layout = (0, 1) * REPLICAS
    uplinks = [Uplink(home.line.uplink, home.line.round_trip / 2, piece_bytes=PACKET_BYTES) for _ in layout]
    overrides = (*home.overrides, *home.steps, "run.inner.target_tokens=1_000_000_000")
    async with shaped_swarm(layout, overrides, uplinks, home.operations, home.config) as (swarm, unshaped):
        started = time.monotonic()
        await swarm.until(
            lambda: all(last_account(node.events).trained for node in swarm.of_stage(0)), 600.0, "a microbatch each"
        )
        await swarm.rest(settle)
        marks = [_Mark(swarm, uplinks)]
        for _ in range(WINDOWS):
            await swarm.rest(seconds / WINDOWS, 60.0)
            marks.append(_Mark(swarm, uplinks))
        unshaped_bytes = unshaped.sent
        settled = marks[0].at - started
    first, last = marks[0], marks[-1]
    took = last.at - first.at
    per_window = [_shares(before, after, 0) for before, after in pairwise(marks)]
    trained = sum(_grown(first, last, 0, "trained"))
    tokens = trained * home.full.run.microbatch_tokens * home.stretch / took
    kinds = {kind for account in last.accounts for kind in account.bytes_sent}
    return {
        "device_share": fmean(_shares(first, last, 0)),
        "last_stage_share": fmean(_shares(first, last, 1)),
        "share_of_windows": [fmean(each) for each in per_window],
        "share_of_nodes": _shares(first, last, 0),
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
        "put_back": sum(_grown(first, last, 0, "put_back")),
        "passed_unshaped": unshaped_bytes,
        "cpu_share": (last.cpu - first.cpu) / took / (os.cpu_count() or 1),
        "machine_cpu_share": 1.0 - (last.idle - first.idle) / took / (os.cpu_count() or 1),
        "settled_seconds": settled,
        "seconds": took,
        "load": os.getloadavg()[0],
    }


class _Mark:
    """The books of all nodes at a moment."""

    def __init__(self, swarm: Swarm, uplinks: Sequence[Uplink]) -> None:
        swarm.read_events()
        self.at = time.monotonic()
        self.accounts: list[Account] = [last_account(node.events) for node in swarm.nodes]
        self.stages = [node.stage for node in swarm.nodes]
        self.sent = [uplink.sent for uplink in uplinks]
        self.cpu = sum(_cpu_seconds(psutil.Process(node.pid)) for node in swarm.nodes)
        self.cpu += sum(psutil.Process().cpu_times()[:2])
        times = psutil.cpu_times()
        self.idle = times.idle + times.iowait


def _cpu_seconds(process: psutil.Process) -> float:
    """Of a daemon and its p2pd."""
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def _pairs(first: _Mark, last: _Mark, stage: int) -> list[tuple[Account, Account]]:
    pairs = zip(first.accounts, last.accounts, first.stages, strict=True)
    return [(before, after) for before, after, own in pairs if own == stage]


def _grown(first: _Mark, last: _Mark, stage: int, what: str) -> list[int]:
    return [getattr(after, what) - getattr(before, what) for before, after in _pairs(first, last, stage)]


def _shares(first: _Mark, last: _Mark, stage: int) -> list[float]:
    """Of the time, that each device of a stage worked."""
    return [
        (after.busy_seconds - before.busy_seconds) / (after.time - before.time)
        for before, after in _pairs(first, last, stage)
    ]


def row_of(home: Home, found: dict[str, Any] | None) -> dict[str, Any]:
    """One line: planned at full size, planned as scaled, and measured where daemons ran."""
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
        "outer_share": [outer_share(home.full_loads, home.full), outer_share(home.loads, home.scaled)],
        "planned_in_full": home.planned_in_full().share,
        "planned": plan.device_share[0],
        "planned_uplink": list(plan.uplink_share),
        "limit": plan.limit,
    }
    return row if found is None else {**row, **found, "ratio": found["device_share"] / row["planned"]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each, with the range over the parts of the measured time."""
    head = ["activations", "planned at full size", "planned", "measured (parts of the time)", "measured / planned"]
    return table_of([[*head, "tokens/s of four replicas", "CPU of the swarm", "of the machine"], *map(_cells, rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["name"], f"{row['planned_in_full']:.3f}", f"{row['planned']:.3f}"]
    if "device_share" not in row:
        return [*cells, *["–"] * 5]
    parts = sorted(row["share_of_windows"])
    return [
        *cells,
        f"{row['device_share']:.3f} ({parts[0]:.3f}, {median(parts):.3f}, {parts[-1]:.3f})",
        f"{row['ratio']:.2f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['cpu_share']:.0%}",
        f"{row['machine_cpu_share']:.0%}",
    ]
