"""A stage on a GPU: tokens a second and how much of the device that is, by precision; the moments at which the host
waits for it; copies beside computing; and two stages of daemons on one device, with and without exchanges.

    python -m benchmarks.gpu --out gpu.json --trace gpu-trace.json
    python -m benchmarks.gpu --device cpu --hidden 128 --layers 2 --length 64 --windows 2 --seconds 1 --no-daemons

Runs by itself; without the device it says so in one line and ends with exit code 3. The same code runs on the
processor, where nothing is copied and a wait is a number that the host reads.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from benchmarks.command import command, parser_of, positive, results_file, save, whole
from benchmarks.gpu_trace import FRAGMENTS, Course, traced
from benchmarks.gpu_waits import LOOKED_AT, MOST_STAGES, random_batch, waits, waits_of_stages
from benchmarks.pipeline import STEPS_BEFORE_WINDOW, run_swarm, settings_of
from noloco_node.config.load import Config, load_config
from noloco_node.config.run_spec import PrecisionName, RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import build_stage
from noloco_node.sizing.devices import peak_of
from noloco_node.sizing.footprint import footprint_of
from noloco_node.training.compute_device import check_device, device_name, finish, resolve_device
from noloco_node.training.stage_trainer import StageTrainer

NO_DEVICE = 3
"""Exit code where the device is not there."""
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
STEP_EVERY = 8
"""Microbatches between two inner steps."""
WARM_UP = 3
LEAST_DAEMON_STEPS = 2 * STEPS_BEFORE_WINDOW
PRODUCT = {"cpu": 1024, "cuda": 8192}

Reached = Mapping[torch.dtype, float]
"""Operations a second of one large product of matrices."""


@dataclass(frozen=True)
class Alone:
    """A whole model as one stage, medians over the rounds."""

    precision: str
    tokens_per_second: float
    slowest: float
    fastest: float
    flop_per_second: float
    mfu: float | None
    """Of the maker's peak; None where that is not known."""
    of_a_product: float
    """Of what one large product of matrices reaches here."""
    memory: int
    """Bytes of the device at the most; 0 on the processor."""
    waits_a_microbatch: float
    """For the device: copies to the host, and numbers that it reads otherwise."""
    waits_a_step: float


@dataclass(frozen=True)
class Layout:
    """A swarm of daemons on the one device, medians over the rounds."""

    layout: str
    tokens_per_second: float
    slowest: float
    fastest: float
    flop_per_second: float
    """Of all daemons together: every token goes through the whole model once."""
    mfu: float | None
    of_a_product: float


def config_of(options: argparse.Namespace, *overrides: str) -> Config:
    """The model that is measured, on made-up tokens or on Python's own sources."""
    heads = max(1, options.hidden // 64)
    return load_config(
        CONFIG,
        [
            f"run.model.config.hidden_size={options.hidden}",
            f"run.model.config.intermediate_size={options.hidden * 8 // 3}",
            f"run.model.config.num_hidden_layers={options.layers}",
            f"run.model.config.num_attention_heads={heads}",
            f"run.model.config.num_key_value_heads={heads}",
            f"run.model.config.max_position_embeddings={options.length}",
            f"run.data.sequence_length={options.length}",
            f"run.inner.microbatch_windows={options.windows}",
            f"run.inner.global_batch_tokens={options.windows * options.length * STEP_EVERY}",
            *overrides,
        ],
    )


class Trained:
    """A stage that trains on tokens drawn at random."""

    def __init__(self, run: RunSpec, device: str) -> None:
        self.device = torch.device(device)
        self.trainer = StageTrainer(build_stage(run.model, 0), run.inner, device=device, wire_dtype=torch.float32)
        self._inputs, self._labels = random_batch(run)
        self.tokens = self._labels.numel()

    def microbatch(self) -> None:
        """Forward, loss and backward."""
        self.trainer.loss(self._inputs, self._labels)

    def step(self) -> None:
        """The inner step."""
        self.trainer.step(1e-4)


def rate_of(trained: Trained, seconds: float) -> float:
    """Tokens a second."""
    for _ in range(WARM_UP):
        trained.microbatch()
    trained.step()
    finish(trained.device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(STEP_EVERY):
            trained.microbatch()
        trained.step()
        finish(trained.device)
        count += STEP_EVERY
    return count * trained.tokens / (time.perf_counter() - began)


def product_flop_per_second(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """What one large product of matrices reaches."""
    size = PRODUCT[device.type]
    one: Tensor = torch.randn(size, size, device=device, dtype=dtype)
    torch.mm(one, one)
    finish(device)  # what the first one sets up is no part of it
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(one, one)
        count += 1
        finish(device)
    return count * 2.0 * size**3 / (time.perf_counter() - began)


def one_stage(options: argparse.Namespace, precision: PrecisionName, *overrides: str) -> RunSpec:
    """The whole model as one stage."""
    return config_of(options, "run.model.stages=1", f"run.inner.precision={precision}", *overrides).run


def alone(options: argparse.Namespace, flop: float, reached: Reached) -> list[Alone]:
    """Every precision in turn, again and again; `flop` of a token."""
    runs = {precision: one_stage(options, precision) for precision in options.precisions}
    rates: dict[str, list[float]] = {precision: [] for precision in runs}
    seen: dict[str, tuple[float, float, int]] = {}
    for _ in range(options.rounds):
        for precision, run in runs.items():
            rate, seen[precision] = look(run, options.device, options.seconds)
            rates[precision].append(rate)
    return [
        row_of(precision, taken, flop, peak_of(device_name(options.device), precision), reached, seen[precision])
        for precision, taken in rates.items()
    ]


def look(run: RunSpec, device: str, seconds: float) -> tuple[float, tuple[float, float, int]]:
    """Tokens a second of one round; waits a microbatch, waits a step and the most memory (bytes). Nothing of an earlier
    look is left, whose memory would count."""
    here = torch.device(device)
    gc.collect()
    if here.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(here)
    trained = Trained(run, device)
    rate, copies = rate_of(trained, seconds), trained.trainer.copies
    microbatches = waits(here, copies, lambda: [trained.microbatch() for _ in range(LOOKED_AT)])
    memory = torch.cuda.max_memory_allocated(here) if here.type == "cuda" else 0
    return rate, (microbatches / LOOKED_AT, float(waits(here, copies, trained.step)), memory)


def row_of(
    precision: str,
    rates: Sequence[float],
    flop: float,
    peak: float | None,
    reached: Reached,
    seen: tuple[float, float, int],
) -> Alone:
    """What some rounds come to; `flop` for a token, `peak` and `reached` a second."""
    rate = statistics.median(rates)
    product = reached[computed_in(precision)]
    mfu = None if peak is None else rate * flop / peak
    a_microbatch, a_step, memory = seen
    return Alone(
        precision,
        rate,
        min(rates),
        max(rates),
        rate * flop,
        mfu,
        rate * flop / product,
        memory,
        a_microbatch,
        a_step,
    )


def computed_in(precision: str) -> torch.dtype:
    """Of a precision of `inner.precision`."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


LAYOUTS: dict[str, tuple[str, ...]] = {
    "2 stages x 1": ("local_swarm.replicas=1",),
    "2 stages x 2, no exchange": ("local_swarm.replicas=2", "run.outer.inner_steps=1000000"),
    "2 stages x 2, exchanges all the time": ("local_swarm.replicas=2", "run.outer.inner_steps=2"),
}


def layouts_of(options: argparse.Namespace, precision: PrecisionName) -> dict[str, Config]:
    """The swarms that are measured; none where none is wanted. UserError (USAGE) where they would end too soon."""
    if options.no_daemons:
        return {}
    if options.daemon_steps < LEAST_DAEMON_STEPS:
        raise UserError(
            ExitCode.USAGE,
            f"--daemon-steps is {options.daemon_steps}, and such a swarm ends before it is measured",
            f"name {LEAST_DAEMON_STEPS} or more, or --no-daemons",
        )
    tokens = options.windows * options.length * STEP_EVERY * options.daemon_steps
    settings = [
        "run.model.stages=2",
        f"run.inner.precision={precision}",
        *settings_of(tokens, load_config(CONFIG).run.inner.warmup_tokens),
        f"node.device={options.device}",
        "node.in_flight=2",
    ]
    return {name: config_of(options, *settings, *layout) for name, layout in LAYOUTS.items()}


def daemons(name: str, config: Config, rounds: int, reached: Reached) -> Layout:
    """A swarm on the one device, again and again."""
    rates = [float(cast(float, asyncio.run(run_swarm(config))["tokens_per_second"])) for _ in range(rounds)]
    precision, flop = config.run.inner.precision, sum(footprint_of(config.run).flop_per_token)
    peak = peak_of(device_name(config.node.device), precision)
    return layout_row(name, rates, flop, peak, reached[computed_in(precision)])


def layout_row(name: str, rates: Sequence[float], flop: float, peak: float | None, product: float) -> Layout:
    """What some rounds come to; `flop` for a token, `peak` and `product` a second."""
    rate = statistics.median(rates)
    mfu = None if peak is None else rate * flop / peak
    return Layout(name, rate, min(rates), max(rates), rate * flop, mfu, rate * flop / product)


def table(rows: Sequence[Alone]) -> str:
    """A row for each precision."""
    lines = [
        "| precision | tokens/s (range) | TFLOP/s | MFU | of a product | memory, MB | waits a microbatch | a step |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        mfu = "–" if row.mfu is None else f"{row.mfu:.3f}"
        lines.append(
            f"| {row.precision} | {row.tokens_per_second:,.0f} ({row.slowest:,.0f} to {row.fastest:,.0f}) "
            f"| {row.flop_per_second / 1e12:.3f} | {mfu} | {row.of_a_product:.3f} | {row.memory / 1e6:.0f} "
            f"| {row.waits_a_microbatch:.2f} | {row.waits_a_step:.0f} |"
        )
    return "\n".join(lines)


def layout_line(row: Layout) -> str:
    """For a person."""
    share = "" if row.mfu is None else f"MFU {row.mfu:.3f}, "
    return (
        f"{row.layout}: {row.tokens_per_second:,.0f} tokens/s ({row.slowest:,.0f} to {row.fastest:,.0f}), "
        f"{share}{row.of_a_product:.3f} of a product"
    )


def trace_line(shares: Mapping[str, float | None], course: Course) -> str:
    """For a person."""
    told = ", ".join(f"{what} {'–' if share is None else f'{share:.1%}'}" for what, share in shares.items())
    return (
        f"of the time of {course.microbatches} microbatches, {course.inner_steps} inner steps and "
        f"{course.outer_steps} outer step: {told}; the outer step kept training waiting for "
        f"{1e3 * course.held_seconds:.1f} ms"
    )


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, auto")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--hidden", type=whole, default=1024)
    parser.add_argument("--layers", type=whole, default=16)
    parser.add_argument("--length", type=whole, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=whole, default=8, help="of a microbatch")
    parser.add_argument("--seconds", type=positive, default=8.0, help="for which each precision trains in each round")
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--daemon-steps", type=whole, default=120, help="inner steps of each swarm of daemons")
    parser.add_argument("--no-daemons", action="store_true")
    parser.add_argument("--trace", type=results_file, help="where the profiler's trace goes, for chrome://tracing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what is found as it comes, and write the figures so far."""
    options = options_of(arguments)
    try:
        check_device(options.device)
    except UserError as error:
        print(f"benchmarks.gpu: {error.message}; --device cpu runs the same small", file=sys.stderr)
        return NO_DEVICE
    options.device = resolve_device(options.device)
    layouts = layouts_of(options, options.precisions[0])
    stages = config_of(options, f"run.model.stages={min(MOST_STAGES, options.layers)}").run
    looked_into = one_stage(options, options.precisions[-1], f"run.outer.fragments={FRAGMENTS}")
    flop = [sum(footprint_of(run).flop_per_token) for run in (looked_into, stages, *(c.run for c in layouts.values()))]
    torch.set_num_threads(1)
    name = device_name(options.device)
    settings = {key: str(value) for key, value in vars(options).items()}
    found: dict[str, Any] = {"device": name, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found |= {"torch": torch.__version__, "settings": settings}

    def keep(what: str, figures: object) -> None:
        found[what] = figures
        save(options.out, found)

    device, seconds = torch.device(options.device), options.seconds / 4
    reached = {dtype: product_flop_per_second(device, dtype, seconds) for dtype in (torch.float32, torch.bfloat16)}
    rows = alone(options, flop[0], reached)
    keep("alone", [asdict(row) for row in rows])
    print(f"{name}\n\n{table(rows)}\n", flush=True)
    calls = waits_of_stages(stages, options.device)
    keep("waits", calls)
    print("waits a call: " + ", ".join(f"{call} {count:.2f}" for call, count in calls.items()), flush=True)
    shares, course = asyncio.run(traced(looked_into, options.device, options.trace))
    keep("trace", {**shares, "course": asdict(course)})
    print(trace_line(shares, course), flush=True)
    swarms: list[Layout] = []
    for layout, config in layouts.items():
        swarms.append(daemons(layout, config, options.rounds, reached))
        keep("daemons", [asdict(row) for row in swarms])
        print(layout_line(swarms[-1]), flush=True)
    return 0


if __name__ == "__main__":
    command(main)
