"""What narrow activations cost in loss: the laboratory with each codec between 2, 4 and 8 stages.

    python -m benchmarks.activation_loss --out benchmarks/results/activation_loss.json

Four replicas a stage train eight layers on 65,536 tokens; all activations and their gradients go through the codec, in
one process with the arithmetic of the wire. Printed is the held-out loss with fp32 over the seeds, and what each other
codec adds to it with the same seed, in thousandths of a nat.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import command, parser_of, save, whole
from noloco_node.config.experiments import WorldSpec
from noloco_node.config.load import load_config
from noloco_node.laboratory.training import simulate

REFERENCE = "fp32"
REPLICAS = 4
CHANGES = (
    "run.evaluation.windows=64",
    "run.inner.target_tokens=65536",
    "run.inner.warmup_tokens=4096",
    "run.model.config.num_hidden_layers=8",
)

Losses = dict[int, dict[str, dict[int, float]]]
"""Nats a token by stages, codec and seed."""


def loss_of(config: Path, more: Sequence[str], stages: int, codec: str, seed: int) -> float:
    """Held-out loss of one training, nats a token, with `more` settings. ArithmeticError where it diverged."""
    changes = (*CHANGES, *more, f"run.model.stages={stages}", f"run.pipeline.activations={codec}")
    run = load_config(config, changes).run
    measured = simulate(run, WorldSpec(), "noloco", replicas=REPLICAS, seed=seed, evaluations=1, divergence_points=2)
    if measured.validation_loss is None:
        raise ArithmeticError(f"{stages} stages with {codec} diverged")
    return measured.validation_loss


def row_of(stages: int, losses: dict[str, dict[int, float]]) -> str:
    """One line of the table in the pages."""
    reference = losses[REFERENCE]
    known = list(reference.values())
    deviation = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    cells = [f"{statistics.mean(known):.3f}{deviation}"]
    for codec, by_seed in losses.items():
        if codec != REFERENCE:
            added = [1000 * (loss - reference[seed]) for seed, loss in by_seed.items()]
            cells.append(f"{statistics.mean(added):+.1f} ({', '.join(f'{each:+.1f}' for each in added)})")
    return f"| {stages} | {' | '.join(cells)} |"


def measure(
    config: Path, more: Sequence[str], stages: Sequence[int], codecs: Sequence[str], seeds: Sequence[int]
) -> Losses:
    """All of it; a row is printed when it is done."""
    found: Losses = {}
    print(f"| stages | {REFERENCE} | {' | '.join(codecs)} |")
    for count in stages:
        found[count] = {
            codec: {seed: loss_of(config, more, count, codec, seed) for seed in seeds} for codec in (REFERENCE, *codecs)
        }
        print(row_of(count, found[count]), flush=True)
    return found


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("tests/configs/micro.yaml"))
    parser.add_argument("--stages", type=whole, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--codecs", nargs="+", default=["bf16", "int8", "int4"], choices=["bf16", "fp16", "int8", "int4"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="of a subspace, for example")
    options = parser.parse_args()
    torch.set_num_threads(1)
    losses = measure(options.config, options.set, options.stages, options.codecs, options.seeds)
    save(options.out, losses)


if __name__ == "__main__":
    command(main)
