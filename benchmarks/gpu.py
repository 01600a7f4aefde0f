"""A stage on a GPU, in the order in which a short loan of one answers most: whether it is right, tokens a second beside
a plain loop of the same model and by a node's thread, daemons on one device, the arithmetic of outer steps, the moments
at which the host waits, copies beside computing, and what is seldom: states, documents in a row, memory that is full.

    python -m benchmarks.gpu --out gpu.jsonl --trace gpu-trace.json
    python -m benchmarks.gpu --device cpu --hidden 128 --layers 2 --length 64 --windows 2 --seconds 1 --only exact alone

Each step has a process and a time of its own. One that takes longer, or dies, is put down as cut, and the next one
begins. Every figure is a line of JSON as soon as it is known, and on the disk. Without the device one line says so,
with exit code 3. The same code runs on the processor, where a wait is a number that the host reads.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.codecs import on_device
from benchmarks.command import command, parser_of, positive, results_file, whole
from benchmarks.gpu_checks import Say, exact, first_without_memory, trainer_of, without_memory
from benchmarks.gpu_trace import traced
from benchmarks.gpu_waits import LOOKED_AT, MOST_STAGES, random_batch, waits, waits_of_stages
from benchmarks.gpu_worker import by_the_worker, states, what_crosses
from benchmarks.pipeline import STEPS_BEFORE_WINDOW, run_swarm, settings_of
from noloco_node import __version__
from noloco_node.config.load import Config, load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import PrecisionName, RunSpec
from noloco_node.document_marks import BEGINS
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import build_stage
from noloco_node.outer.codec import CODECS
from noloco_node.sizing.devices import peak_of
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import memory_of
from noloco_node.training.compute_device import (
    check_device,
    device_kind,
    device_name,
    finish,
    free_cached_memory,
    has_own_memory,
    memory_of_device,
    resolve_device,
    use_tensor_cores,
)
from noloco_node.training.host_copies import HostCopies

NO_DEVICE = 3
"""Exit code where the device is not there."""
PRECISIONS: list[PrecisionName] = sorted(get_args(PrecisionName), key=lambda name: name == "fp32")
"""All of them. The first is that of every step which has one, and on a card nobody trains in fp32."""
CONFIG = Path(__file__).parent.parent / "configs" / "tiny.yaml"
STEP_EVERY = 8
"""Microbatches between two inner steps."""
AS_CONSUMERS = (("run.inner.backward=checkpoint",), ("run.inner.backward=checkpoint", "run.inner.optimizer=muon"))
"""Settings beside a precision."""
WARM_UP = 3
CODED = 1 << 24
"""Weights of an outer step whose arithmetic is timed."""
CROSSINGS = 200
"""Copies of a microbatch's size, in each direction, whose numbers are looked at."""
LEAST_DAEMON_STEPS = 2 * STEPS_BEFORE_WINDOW
PRODUCT, PRODUCT_OF_A_CARD = 1024, 8192
"""Rows of the matrices whose product is timed."""

Reached = Mapping[torch.dtype, float]
"""Operations a second of one large product of matrices."""


@dataclass(frozen=True)
class Alone:
    """A whole model as one stage, medians over the rounds."""

    precision: str
    backward: str
    optimizer: str
    parameters: int
    tokens_per_second: float
    slowest: float
    fastest: float
    flop_per_second: float
    mfu: float | None
    """Of the maker's peak; None where that is not known."""
    of_a_product: float
    """Of what one large product of matrices reaches here."""
    of_a_plain_loop: float
    """Of what a plain loop of torch reaches with the same model and AdamW, computed in the same type, with its graph
    kept."""
    memory: int
    """Bytes of the device at the most; 0 where it has no memory of its own."""
    planned: int
    """Bytes that the plan has for it."""
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
            f"run.model.config.intermediate_size={max(1, options.hidden * 8 // 3 // 64) * 64}",
            f"run.model.config.num_hidden_layers={options.layers}",
            f"run.model.config.num_attention_heads={heads}",
            f"run.model.config.num_key_value_heads={heads}",
            f"run.model.config.max_position_embeddings={options.length}",
            f"run.data.sequence_length={options.length}",
            f"run.inner.microbatch_windows={options.windows}",
            f"run.inner.global_batch_tokens={options.windows * options.length * STEP_EVERY}",
            "run.inner.optimizer=adamw",
            *overrides,
        ],
    )


class Trained:
    """A stage that trains on tokens drawn at random."""

    def __init__(self, run: RunSpec, device: str, *, documents: int = 1) -> None:
        """`documents`: so many in each row."""
        self.device = torch.device(device)
        self.trainer = trainer_of(run, 0, device)
        self._inputs, labels = random_batch(run)
        self._labels = labels.clone()  # a single row shares its memory with the inputs
        length = labels.shape[1] // documents
        self._labels[:, length::length] |= BEGINS
        self.tokens = self._labels.numel()

    def microbatch(self) -> None:
        """Forward, loss and backward."""
        self.trainer.loss(self._inputs, self._labels)

    def step(self) -> None:
        """The inner step."""
        self.trainer.step(1e-4)


class Plain:
    """The same model in a loop as anybody writes it: no versions, no bounds, nothing crosses but a batch."""

    def __init__(self, run: RunSpec, device: str) -> None:
        self.device = torch.device(device)
        kept = torch.bfloat16 if run.inner.precision in ("bf16", "bf16-pure") else torch.float32
        self._stage = build_stage(run.model, 0).to(self.device, kept)
        self._computing = torch.autocast(self.device.type, torch.bfloat16, run.inner.precision == "bf16-mixed")
        self._optimizer = torch.optim.AdamW(self._stage.parameters(), lr=1e-4, fused=True)
        self._inputs, self._labels = random_batch(run)
        self.tokens = self._labels.numel()

    def microbatch(self) -> None:
        """Forward, loss and backward."""
        with self._computing:
            logits = cast(Tensor, self._stage(self._inputs.to(self.device)))
        F.cross_entropy(logits.float().flatten(0, 1), self._labels.to(self.device).flatten()).backward()  # pyright: ignore

    def step(self) -> None:
        """The optimizer's step."""
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self._optimizer.zero_grad()


def rate_of(trained: Trained | Plain, seconds: float) -> float:
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
    size = _rows(device)
    one: Tensor = torch.randn(size, size, device=device, dtype=dtype)
    torch.mm(one, one)
    finish(device)  # what the first one sets up is no part of it
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(one, one)
        count += 1
        finish(device)
    return count * 2.0 * size**3 / (time.perf_counter() - began)


def bus(device: torch.device, *, pinned: bool) -> dict[str, float]:
    """Bytes a second of a long vector's way to the host and back, and seconds in which the host's memory is made."""
    there = torch.zeros(_rows(device) ** 2, device=device)
    began = time.perf_counter()
    room = HostCopies(device).room(there.shape, there.dtype) if pinned else torch.empty(there.shape)
    room.zero_()
    moments = [time.perf_counter() - began]
    for to, source in ((room, there), (there, room)) * 2:  # the first of each sets up what the second finds
        finish(device)
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        finish(device)
        moments.append(room.nbytes / (time.perf_counter() - began))
    return {"made_s": moments[0], "to_host_bytes_per_second": moments[3], "to_device_bytes_per_second": moments[4]}


def _rows(device: torch.device) -> int:
    return PRODUCT if device_kind(device) is None else PRODUCT_OF_A_CARD


def one_stage(options: argparse.Namespace, precision: PrecisionName, *overrides: str) -> RunSpec:
    """The whole model as one stage."""
    return config_of(options, "run.model.stages=1", f"run.inner.precision={precision}", *overrides).run


def alone(options: argparse.Namespace, reached: Reached, say: Say) -> None:
    """Every precision in turn, each beside a plain loop; the first of them as the consumers' files have it, too."""
    for precision in options.precisions:
        plain = rate_of(Plain(one_stage(options, precision), options.device), options.seconds)
        for more in ((), *(AS_CONSUMERS if precision == options.precisions[0] else ())):
            run = one_stage(options, precision, *more)
            looks = [look(run, options.device, options.seconds) for _ in range(options.rounds)]
            say("alone", **asdict(row_of(run, looks, plain, options.device, reached)))


def large(options: argparse.Namespace, reached: Reached, say: Say) -> None:
    """A model of six times as many weights, by the first precision, in microbatches as the consumers' files have them.
    Nothing but a word where the device has no room for it."""
    larger = argparse.Namespace(**vars(options))
    larger.hidden, larger.layers = 2 * options.hidden, options.layers * 3 // 2
    larger.precisions, larger.windows = options.precisions[:1], min(2, options.windows)
    run, device = one_stage(larger, larger.precisions[0]), torch.device(options.device)
    planned, has = planned_bytes(run), memory_of_device(device).get("free")
    if has is not None and has < planned:
        say("large", left_out=f"it takes {planned} bytes of the device, which has {has}")
        return
    alone(larger, reached, say)


def planned_bytes(run: RunSpec) -> int:
    """What the plan has of a device for a whole model as one stage, whose inputs are there."""
    need = memory_of(run, NodeSettings(in_flight=1), footprint_of(run), 1)[0]
    return need.on_device - need.arriving


def look(run: RunSpec, device: str, seconds: float) -> tuple[float, tuple[float, float, int]]:
    """Tokens a second of one round; waits a microbatch, waits a step and the most memory (bytes). Nothing of an earlier
    look is left, whose memory would count."""
    here = torch.device(device)
    gc.collect()
    free_cached_memory(device)
    own = torch.get_device_module(here) if has_own_memory(device) else None
    if own is not None:
        own.reset_peak_memory_stats(here)
    trained = Trained(run, device)
    rate, copies = rate_of(trained, seconds), trained.trainer.copies
    microbatches = waits(here, copies, lambda: [trained.microbatch() for _ in range(LOOKED_AT)])
    memory = 0 if own is None else int(own.max_memory_allocated(here))
    return rate, (microbatches / LOOKED_AT, float(waits(here, copies, trained.step)), memory)


def row_of(
    run: RunSpec, looks: Sequence[tuple[float, tuple[float, float, int]]], plain: float, device: str, reached: Reached
) -> Alone:
    """What some rounds come to beside a plain loop's tokens a second."""
    precision, footprint = run.inner.precision, footprint_of(run)
    rates = [rate for rate, _ in looks]
    rate, flop = statistics.median(rates), sum(footprint.flop_per_token)
    peak = peak_of(device_name(device), precision)
    a_microbatch, a_step, memory = looks[-1][1]
    return Alone(
        precision,
        run.inner.backward,
        run.inner.optimizer,
        sum(footprint.parameters),
        rate,
        min(rates),
        max(rates),
        rate * flop,
        None if peak is None else rate * flop / peak,
        rate * flop / reached[computed_in(precision)],
        rate / plain,
        memory,
        planned_bytes(run),
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
    """The swarms that are measured. UserError (USAGE) where they would end too soon."""
    if options.daemon_steps < LEAST_DAEMON_STEPS:
        raise UserError(
            ExitCode.USAGE,
            f"--daemon-steps is {options.daemon_steps}, and such a swarm ends before it is measured",
            f"name {LEAST_DAEMON_STEPS} or more, or leave it out",
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


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, xpu, mps, cpu, auto")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--hidden", type=whole, default=1024)
    parser.add_argument("--layers", type=whole, default=16)
    parser.add_argument("--length", type=whole, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=whole, default=8, help="of a microbatch")
    parser.add_argument("--seconds", type=positive, default=4.0, help="for which each precision trains in each round")
    parser.add_argument("--rounds", type=whole, default=1)
    parser.add_argument("--total", type=positive, default=480.0, help="seconds for all steps together")
    parser.add_argument("--only", nargs="+", default=list(STEPS), choices=list(STEPS), help="these steps")
    parser.add_argument("--step", choices=list(STEPS), help="this one, in this process")
    parser.add_argument("--daemon-steps", type=whole, default=120, help="inner steps of each swarm of daemons")
    parser.add_argument("--trace", type=results_file, help="where the profiler's trace goes, for chrome://tracing")
    return parser.parse_args(arguments)


def _exact(options: argparse.Namespace, say: Say) -> None:
    small = argparse.Namespace(**vars(options))
    small.hidden, small.layers, small.length = min(256, options.hidden), 2, min(64, options.length)
    exact(lambda *settings: config_of(small, *settings).run, options.device, say)


def _streams(options: argparse.Namespace, say: Say) -> None:
    what_crosses(options.device, options.windows * options.length * options.hidden, CROSSINGS, say)


def _oom(options: argparse.Namespace, say: Say) -> None:
    without_memory(one_stage(options, "bf16"), options.device, say)


def _oom_first(options: argparse.Namespace, say: Say) -> None:
    first_without_memory(options.device, say)


def _worker(options: argparse.Namespace, say: Say) -> None:
    run = one_stage(options, options.precisions[0], "run.outer.codec=int4")
    asyncio.run(by_the_worker(run, options.device, options.seconds, say))


def _states(options: argparse.Namespace, say: Say) -> None:
    asyncio.run(states(one_stage(options, options.precisions[0]), options.device, say))


def _documents(options: argparse.Namespace, say: Say) -> None:
    run = one_stage(options, options.precisions[0])
    for count in (1, 2):
        rate = rate_of(Trained(run, options.device, documents=count), options.seconds / 2)
        say("documents in a row", count=count, tokens_per_second=rate)


def _reached(options: argparse.Namespace) -> dict[torch.dtype, float]:
    where = torch.device(options.device)
    use_tensor_cores(where)  # as a node has them
    return {of: product_flop_per_second(where, of, options.seconds / 4) for of in (torch.bfloat16, torch.float32)}


def _machine(options: argparse.Namespace, say: Say) -> None:
    for dtype, reached in _reached(options).items():
        say("product", dtype=str(dtype), flop_per_second=reached)
    for pinned in (True, False):
        say("bus", pinned=pinned, **bus(torch.device(options.device), pinned=pinned))


def _alone(options: argparse.Namespace, say: Say) -> None:
    alone(options, _reached(options), say)


def _large(options: argparse.Namespace, say: Say) -> None:
    large(options, _reached(options), say)


def _codecs(options: argparse.Namespace, say: Say) -> None:
    size = min(CODED, options.hidden**2 * options.layers)
    for codec in (codec for codec in CODECS.values() if codec.on_a_device):
        say(codec.name, weights=size, **on_device(codec, size, torch.device(options.device)))


def _waits(options: argparse.Namespace, say: Say) -> None:
    run = config_of(options, f"run.model.stages={min(MOST_STAGES, options.layers)}").run
    for call, count in waits_of_stages(run, options.device).items():
        say("waits", call=call, count=count)


def _trace(options: argparse.Namespace, say: Say) -> None:
    run = one_stage(options, options.precisions[0])
    shares, course = asyncio.run(traced(run, options.device, options.trace))
    say("shares", **shares, course=asdict(course))


def _daemons(options: argparse.Namespace, say: Say) -> None:
    reached = _reached(options)
    for layout, config in layouts_of(options, options.precisions[0]).items():
        say("daemons", **asdict(daemons(layout, config, options.rounds, reached)))


STEPS: dict[str, tuple[float, Callable[[argparse.Namespace, Say], None]]] = {
    "exact": (75.0, _exact),
    "streams": (45.0, _streams),
    "oom": (40.0, _oom),
    "machine": (30.0, _machine),
    "alone": (120.0, _alone),
    "large": (90.0, _large),
    "worker": (80.0, _worker),
    "daemons": (170.0, _daemons),
    "codecs": (20.0, _codecs),
    "waits": (40.0, _waits),
    "trace": (60.0, _trace),
    "states": (90.0, _states),
    "documents": (25.0, _documents),
    "oom_first": (30.0, _oom_first),
}
"""By name in their order: seconds that a step may take at the most, and the step. What is right comes first, then the
figures that decide."""


def write_down(out: Path | None, step: str, what: str, **figures: object) -> None:
    """A figure's line: printed, and on the disk before anything else is done."""
    line = json.dumps({"step": step, "what": what, **figures}, default=str)
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def versions() -> dict[str, str]:
    """When it was measured, and with what: figures of two machines are told apart by it."""
    libraries = {name: metadata.version(name) for name in ("torch", "transformers", "hivemind")}
    built = str(torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None))
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    own = {"noloco_node": __version__, "python": platform.python_version(), "built_for": built}
    return {"began_utc": began, **own, **libraries}


def carried_out(command: Sequence[str], seconds: float) -> str:
    """Run a step's process, with all that it starts, for so many seconds at the most. Why it was cut; nothing where it
    came to its end."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"longer than {seconds:.0f} s"
    return "" if code == 0 else f"its process ended with {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Every step in turn, or the one that is asked for. The figures that are known stay, whatever becomes of others."""
    options = options_of(arguments)
    try:
        check_device(options.device)
    except UserError as error:
        print(f"benchmarks.gpu: {error.message}; --device cpu runs the same small", file=sys.stderr)
        return NO_DEVICE
    options.device = resolve_device(options.device)
    torch.set_num_threads(1)
    if options.step is not None:
        STEPS[options.step][1](options, lambda what, **found: write_down(options.out, options.step, what, **found))
        return 0
    if "daemons" in options.only:
        for config in layouts_of(options, options.precisions[0]).values():
            footprint_of(config.run)
    if options.out is not None:
        options.out.unlink(missing_ok=True)
    settings = {key: str(value) for key, value in vars(options).items()}
    found = {"device": device_name(options.device), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    write_down(options.out, "env", "machine", **found, **versions(), settings=settings)
    given = sys.argv[1:] if arguments is None else list(arguments)
    began, ended = time.monotonic(), 0
    for step in (step for step in STEPS if step in options.only):
        left = options.total - (time.monotonic() - began)
        itself = [sys.executable, "-m", "benchmarks.gpu", *given, "--step", step]
        why = carried_out(itself, min(left, STEPS[step][0])) if left > 0 else "no time was left"
        if why:
            ended = int(ExitCode.FAILURE)
            write_down(options.out, step, "cut", why=why, ok=False)
    return ended


if __name__ == "__main__":
    command(main)
