"""Do the daemons and the laboratory come to the same? One RunSpec as a real local swarm and in the laboratory, by seed.

python -m benchmarks.agreement configs/lab/agreement.yaml --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command import command
from noloco_node.config.lab_spec import WorldSpec
from noloco_node.config.load import load_config
from noloco_node.laboratory.training import simulate
from noloco_node.telemetry.summary import Summary


class Figures(NamedTuple):
    """What a training came to."""

    loss: float
    """Validation loss, nats a token."""
    merged: float
    """That of the mean of the replicas."""
    tokens: int
    """Tokens trained."""
    outer_steps: float
    """Of a replica, on average."""


NAMES = ("loss", "loss merged", "tokens", "outer steps a node")
FORMS = (".4f", ".4f", ",", ".1f")


def seeded(seed: int) -> list[str]:
    """Settings that both get: the seed of the data says also which windows are held out, and those differ in how hard
    they are by more than two trainings do."""
    return [f"run.data.seed={seed}", f"run.model.seed={seed}"]


def by_swarm(config: Path, seed: int) -> Figures:
    """Train with real daemons."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [part for setting in seeded(seed) for part in ("--set", setting)]
        command = [sys.executable, "-m", "noloco_node", "swarm", str(config), "--run-folder", f"{folder}/run"]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        summary = Summary.model_validate_json(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    assert summary.validation_loss is not None
    assert summary.validation_loss_merged is not None
    assert not summary.died
    outer_steps = statistics.mean(summary.outer_rounds.values())
    return Figures(summary.validation_loss, summary.validation_loss_merged, summary.tokens, outer_steps)


def by_laboratory(config: Path, seed: int, lag: int) -> Figures:
    """Train in this process."""
    loaded = load_config(config, seeded(seed))
    result = simulate(
        loaded.run,
        WorldSpec(microbatches_a_step=None, lag=lag),
        "noloco",
        replicas=loaded.local_swarm.replicas,
        seed=seed,
        evaluations=2,
        spread_points=2,
    )
    assert result.validation_loss_fast is not None
    assert result.validation_loss_merged is not None
    return Figures(result.validation_loss_fast, result.validation_loss_merged, result.tokens, result.outer_rounds)


def main() -> None:
    """Print both, seed by seed, and the difference of the means against the spread over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lag", type=int, default=0, help="inner steps that an exchange spans in the laboratory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["seed", *(f"{what}, {where}" for what in NAMES for where in ("swarm", "laboratory"))]
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    pairs: list[tuple[Figures, Figures]] = []
    for seed in arguments.seeds:
        swarm, laboratory = by_swarm(arguments.config, seed), by_laboratory(arguments.config, seed, arguments.lag)
        pairs.append((swarm, laboratory))
        cells = [f"{figures[place]:{form}}" for place, form in enumerate(FORMS) for figures in (swarm, laboratory)]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
    means = [statistics.mean(pair[side].loss for pair in pairs) for side in (0, 1)]
    deviations = [statistics.stdev(pair[side].loss for pair in pairs) if len(pairs) > 1 else 0.0 for side in (0, 1)]
    print(f"\nswarm {means[0]:.4f} ± {deviations[0]:.4f}, laboratory {means[1]:.4f} ± {deviations[1]:.4f}", end=": ")
    agree = abs(means[0] - means[1]) <= 2 * max(deviations)
    print(f"{means[0] - means[1]:+.4f}, {'within' if agree else 'NOT within'} twice the deviation over seeds")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    command(main)
