"""A stage that is compiled (`node.compile`) against the same one that is not: its numbers, its speed, its first call.

    python -m benchmarks.compiled configs/tiny.yaml --out compiled.json

Both stages of the file in one process, on one thread, microbatches of the run's own shape. Fails where outputs or
gradients differ by more than rounding does. Speed is a ratio, on the processor of CPU time: both take turns, and the
median of the rounds counts.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.command import command, device, parser_of, save, whole
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.training.stage_forms import INDUCTOR
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext

MOST_APART = {"fp32": 1e-5, "bf16": 0.05, "bf16-mixed": 0.05, "bf16-pure": 0.05}
"""Largest difference of a vector to that of the plain form, in norms, by precision."""


class Pipeline:
    """First and last stage of a run of two stages, one after the other."""

    def __init__(self, run: RunSpec, device: str) -> None:
        self.head, self.tail = (
            StageTrainer(build_stage(run.model, stage), run.inner, device=device, wire_dtype=torch.float32)
            for stage in (0, 1)
        )

    def microbatch(self, windows: Tensor) -> list[Tensor]:
        """There and back: the activations, and the gradient that came back."""
        passage = ForwardContext()
        outputs = self.head.forward(windows[:, :-1], passage)
        result = self.tail.loss(outputs, windows[:, 1:])
        assert result.input_gradient is not None
        self.head.backward(passage, result.input_gradient, result.loss_sum, result.tokens)
        return [outputs, result.input_gradient]

    def seconds(self, windows: Tensor, count: int) -> float:
        """Of `count` microbatches and one inner step of each stage."""
        clock = time.process_time if self.head.device.type == "cpu" else time.perf_counter
        began = clock()
        for _ in range(count):
            self.microbatch(windows)
        for trainer in (self.head, self.tail):
            trainer.step(0.0)
        return clock() - began


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over that of the first."""
    return float((one.float() - other.float()).norm() / one.float().norm())


def main() -> int:
    """Measure, print and write; 1 where the numbers differ by more than rounding."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/tiny.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--rounds", type=whole, default=7)
    parser.add_argument("--microbatches", type=whole, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_config(options.config, ["run.model.stages=2", *options.set]).run
    shape = (run.inner.microbatch_windows, run.data.sequence_length)
    vocabulary = cast(int, run.model.config["vocab_size"])
    windows = torch.randint(0, vocabulary, (shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(1))
    plain, compiled = Pipeline(run, options.device), Pipeline(run, options.device)
    first: list[float] = []
    for trainer in (compiled.head, compiled.tail):
        began = time.perf_counter()
        trainer.compile_for(shape, documents=run.data.attention == "document", backend=INDUCTOR)
        first.append(time.perf_counter() - began)
    vectors = [[*each.microbatch(windows), each.head.gradient, each.tail.gradient] for each in (plain, compiled)]
    differences = [apart(one, other) for one, other in zip(*vectors, strict=True)]
    ratios = [
        plain.seconds(windows, options.microbatches) / compiled.seconds(windows, options.microbatches)
        for _ in range(options.rounds)
    ]
    result = {
        "precision": run.inner.precision,
        "shape": shape,
        "compile_seconds": first,
        "largest_difference": max(differences),
        "speed_over_plain": statistics.median(ratios),
        "rounds": ratios,
    }
    print(json.dumps(result, indent=2))
    save(options.out, result)
    return int(max(differences) > MOST_APART[run.inner.precision])


if __name__ == "__main__":
    command(main)
