"""What a microbatch costs the host, however few numbers it has: a card that computes it sooner waits for Python.

    python -m benchmarks.host_time --layers 12 24

CPU time of one thread, of a model so small that little but the dispatch of operations is left: whole microbatches by
each backward, and a plain module of the same model with a plain backward. `--compiled` takes checkpointed layers with
`node.compile`, too, after some minutes. `--beside` lets another thread compute in Python meanwhile, with each
`--switch` (seconds, `sys.setswitchinterval`), and tells the time that passes. Two commits are compared by taking turns.
"""

from __future__ import annotations

import sys
import threading
import time
import timeit
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import command, parser_of, positive, whole
from benchmarks.gpu_checks import BACKWARDS, trainer_of
from benchmarks.gpu_waits import random_batch
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.training.stage_forms import INDUCTOR

TAKEN = 16
"""Microbatches of which the quarter that is quickest is told: the rest had a core that others wanted, too."""


def small(layers: int, backward: str) -> RunSpec:
    """A model of so many layers in which nothing takes long."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 8}
    settings = [f"run.model.config.{name}={value}" for name, value in sizes.items()]
    rest = ["run.model.stages=1", "run.data.sequence_length=8", "run.inner.microbatch_windows=1"]
    rest += ["run.inner.precision=bf16", f"run.inner.backward={backward}", "run.inner.optimizer=adamw"]
    return load_config(Path("tiny"), [*settings, *rest]).run


def milliseconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Of one call, as the quickest quarter of some have it."""
    work()
    return 1e3 * sorted(timeit.repeat(work, "gc.enable()", clock, TAKEN, 1))[TAKEN // 4]


def microbatch(run: RunSpec, *, compiled: bool = False) -> Callable[[], object]:
    """Forward, loss and backward of the whole model as one stage."""
    trainer = trainer_of(run, 0, "cpu")
    if compiled:
        trainer.compile_for((1, run.data.sequence_length), documents=False, backend=INDUCTOR)
    inputs, labels = random_batch(run)
    return lambda: trainer.loss(inputs, labels)


def plain(run: RunSpec) -> Callable[[], object]:
    """The same by a module and a backward as anybody writes them."""
    stage = build_stage(run.model, 0).to(torch.bfloat16)
    inputs, labels = random_batch(run)

    def work() -> None:
        logits = cast(Tensor, stage(inputs))
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").backward()  # pyright: ignore

    return work


@contextmanager
def busy_python(switch: float) -> Generator[None]:
    """Another thread computes in Python, and Python changes threads after so many seconds."""
    before, ended = sys.getswitchinterval(), threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    sys.setswitchinterval(switch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def main(arguments: Sequence[str] | None = None) -> None:
    """A line for each number of layers and each way."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("--layers", nargs="+", type=whole, default=[12])
    parser.add_argument("--compiled", action="store_true", help="with node.compile, too")
    parser.add_argument("--beside", action="store_true", help="beside a thread of Python")
    parser.add_argument("--switch", nargs="+", type=positive, default=[5e-3, 5e-4], help="seconds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for layers in options.layers:
        ways = {name: microbatch(small(layers, name)) for name in BACKWARDS}
        if options.compiled:
            ways["checkpoint, compiled"] = microbatch(small(layers, "checkpoint"), compiled=True)
        for name, work in {**ways, "plain module": plain(small(layers, "keep"))}.items():
            print(f"{layers} layers, {name}: {milliseconds(work, time.thread_time):.2f} ms of CPU a microbatch")
        for switch in options.switch if options.beside else ():
            with busy_python(switch):
                passed = milliseconds(ways["keep"], time.perf_counter)
            print(f"{layers} layers, keep, beside Python and {1e3 * switch:g} ms: {passed:.1f} ms pass a microbatch")


if __name__ == "__main__":
    command(main)
