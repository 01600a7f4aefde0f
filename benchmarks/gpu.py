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
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import command, positive, results_file, whole
from benchmarks.pipeline import run_swarm
from noloco_node.config.load import Config, load_config
from noloco_node.config.run_spec import PrecisionName, RunSpec
from noloco_node.errors import UserError
from noloco_node.model.stage import build_stage
from noloco_node.sizing.footprint import footprint_of
from noloco_node.training.compute_device import check_device, device_name, peak_flop_per_second
from noloco_node.training.host_copies import HostCopies
from noloco_node.training.stage_trainer import StageTrainer

NO_DEVICE = 3
"""Exit code where the device is not there."""
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
STEP_EVERY = 8
"""Microbatches between two inner steps."""
WARM_UP = 3
LOOKED_AT = 4
"""Microbatches whose waits are counted and that are traced."""
PRODUCT = {"cpu": 1024, "cuda": 8192}
READS = "aten::_local_scalar_dense"


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
    """For the device, or on the processor numbers that the host reads. One copy to the host is one, too."""
    waits_a_step: float


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
        generator = torch.Generator().manual_seed(1)
        shape = (run.inner.microbatch_windows, run.data.sequence_length + 1)
        rows = torch.randint(int(cast(int, run.model.config["vocab_size"])), shape, generator=generator)
        self._inputs, self._labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self.tokens = self._labels.numel()

    def microbatch(self) -> None:
        """Forward, loss and backward."""
        self.trainer.loss(self._inputs, self._labels)

    def step(self) -> None:
        """The inner step."""
        self.trainer.step(1e-4)

    def finish(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads off tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func.name() == READS
        return func(*args, **(kwargs or {}))


def waits(device: torch.device, copies: HostCopies, work: Callable[[], object]) -> int:
    """How often the host waits for the device in it: for its `copies`, since torch does not warn of waits for events,
    and otherwise."""
    if device.type != "cuda":
        with Reads() as reads:
            work()
        return reads.count
    before = copies.waits
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
    return copies.waits - before + sum("synchroniz" in str(each.message) for each in told)


def rate_of(trained: Trained, seconds: float) -> float:
    """Tokens a second."""
    for _ in range(WARM_UP):
        trained.microbatch()
    trained.step()
    trained.finish()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(STEP_EVERY):
            trained.microbatch()
        trained.step()
        trained.finish()
        count += STEP_EVERY
    return count * trained.tokens / (time.perf_counter() - began)


def product_flop_per_second(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """What one large product of matrices reaches."""
    size = PRODUCT[device.type]
    one: Tensor = torch.randn(size, size, device=device, dtype=dtype)
    one @ one
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        one @ one
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return count * 2.0 * size**3 / (time.perf_counter() - began)


def alone(options: argparse.Namespace) -> list[Alone]:
    """Every precision in turn, again and again."""
    runs = {
        precision: config_of(options, "run.model.stages=1", f"run.inner.precision={precision}").run
        for precision in options.precisions
    }
    flop = sum(footprint_of(next(iter(runs.values()))).flop_per_token)
    device = torch.device(options.device)
    rates: dict[str, list[float]] = {precision: [] for precision in runs}
    seen: dict[str, tuple[float, float, int]] = {}
    for _ in range(options.rounds):
        for precision, run in runs.items():
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            trained = Trained(run, options.device)
            rates[precision].append(rate_of(trained, options.seconds))
            copies = trained.trainer.copies
            microbatches = waits(
                device, copies, lambda trained=trained: [trained.microbatch() for _ in range(LOOKED_AT)]
            )
            memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            seen[precision] = microbatches / LOOKED_AT, float(waits(device, copies, trained.step)), memory
    reached = {
        dtype: product_flop_per_second(device, dtype, options.seconds / 4) for dtype in (torch.float32, torch.bfloat16)
    }
    return [
        row_of(precision, taken, flop, peak_flop_per_second(options.device, precision), reached, seen[precision])
        for precision, taken in rates.items()
    ]


def row_of(
    precision: str,
    rates: Sequence[float],
    flop: float,
    peak: float | None,
    reached: dict[torch.dtype, float],
    seen: tuple[float, float, int],
) -> Alone:
    """What some rounds come to; `flop` for a token, `peak` and `reached` a second."""
    rate = statistics.median(rates)
    product = reached[torch.float32 if precision == "fp32" else torch.bfloat16]
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


def traced(options: argparse.Namespace) -> dict[str, float | None]:
    """Where the device's time goes in some microbatches and a step: computing, copying, and copying beside computing,
    as shares of the time; None where nothing is told of the device."""
    trained = Trained(
        config_of(options, "run.model.stages=1", f"run.inner.precision={options.precisions[-1]}").run, options.device
    )
    trained.microbatch()
    trained.step()
    on_gpu = trained.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiler:
        began = time.perf_counter()
        for _ in range(LOOKED_AT):
            trained.microbatch()
        trained.step()
        trained.finish()
        took = time.perf_counter() - began
    if options.trace:
        profiler.export_chrome_trace(str(options.trace))
    events = [each for each in cast(Any, profiler.events()) if "CUDA" in str(each.device_type)]
    if not events:
        return {"computing": None, "copying": None, "copying beside computing": None}
    copies = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(("Memcpy", "Memset"))]
    kernels = [(e.time_range.start, e.time_range.end) for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    both = length_of(copies) + length_of(kernels) - length_of([*copies, *kernels])
    parts = {"computing": length_of(kernels), "copying": length_of(copies), "copying beside computing": both}
    return {name: 1e-6 * part / took for name, part in parts.items()}


def length_of(spans: Sequence[tuple[float, float]]) -> float:
    """Of their union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


LAYOUTS: dict[str, tuple[str, ...]] = {
    "2 stages x 1": ("local_swarm.replicas=1",),
    "2 stages x 2, no exchange": ("local_swarm.replicas=2", "run.outer.inner_steps=1000000"),
    "2 stages x 2, exchanges all the time": ("local_swarm.replicas=2", "run.outer.inner_steps=2"),
}


def daemons(options: argparse.Namespace, precision: PrecisionName) -> list[dict[str, Any]]:
    """Swarms of daemons on the one device, in turn; tokens a second of each layout."""
    rows: list[dict[str, Any]] = []
    for name, layout in LAYOUTS.items():
        tokens = options.windows * options.length * STEP_EVERY * options.daemon_steps
        config = config_of(
            options,
            "run.model.stages=2",
            f"run.inner.precision={precision}",
            f"run.inner.target_tokens={tokens}",
            f"run.evaluation.every_tokens={10 * tokens}",
            f"node.device={options.device}",
            "node.in_flight=2",
            *layout,
        )
        rates = [asyncio.run(run_swarm(config))["tokens_per_second"] for _ in range(options.rounds)]
        numbers = [float(cast(float, rate)) for rate in rates]
        rows.append(
            {
                "layout": name,
                "tokens_per_second": statistics.median(numbers),
                "range": [min(numbers), max(numbers)],
            }
        )
        print(f"{name}: {rows[-1]['tokens_per_second']:,.0f} tokens/s ({min(numbers):,.0f} to {max(numbers):,.0f})")
    return rows


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


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--hidden", type=whole, default=1024)
    parser.add_argument("--layers", type=whole, default=16)
    parser.add_argument("--length", type=whole, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=whole, default=8, help="of a microbatch")
    parser.add_argument("--seconds", type=positive, default=8.0, help="for which each precision trains in each round")
    parser.add_argument("--rounds", type=whole, default=3)
    parser.add_argument("--daemon-steps", type=whole, default=120, help="inner steps of each swarm of daemons")
    parser.add_argument("--no-daemons", action="store_true")
    parser.add_argument("--trace", type=Path, help="where the profiler's trace goes, for chrome://tracing")
    parser.add_argument("--out", type=results_file)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the figures."""
    options = options_of(arguments)
    try:
        check_device(options.device)
    except UserError as error:
        print(f"benchmarks.gpu: {error.message}; --device cpu runs the same small", file=sys.stderr)
        return NO_DEVICE
    torch.set_num_threads(1)
    name = device_name(options.device)
    rows = alone(options)
    print(f"{name}\n\n{table(rows)}")
    shares = traced(options)
    told = ", ".join(f"{what} {'–' if share is None else f'{share:.1%}'}" for what, share in shares.items())
    print(f"\nof the time of {LOOKED_AT} microbatches and a step: {told}")
    swarms = [] if options.no_daemons else daemons(options, options.precisions[0])
    if options.out:
        found = {"device": name, "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        figures = {"alone": [asdict(row) for row in rows], "trace": shares, "daemons": swarms}
        settings = {key: str(value) for key, value in vars(options).items()}
        options.out.write_text(json.dumps(found | {"settings": settings} | figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    command(main)
