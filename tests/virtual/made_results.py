"""Results as an experiment would leave them, with numbers that a test can know."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noloco_node.config.experiments import LabSpec
from noloco_node.config.load import Config, load_config
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.expansion import Job, Point, expand
from noloco_node.laboratory.experiment import is_tuned
from noloco_node.laboratory.figures import MeasuredLoss, MeasuredSpread, Result, Results
from noloco_node.outer.stability import contraction_factor

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
WARMUP = 2048
PEAK = 3e-3
MADE_LOSS = {"noloco": 1.6, "diloco": 1.62, "data_parallel": 1.5, "local": 1.9}
GAP_OF_SEED = 0.02
"""Loss rises by this from one seed to the next."""


def config(lab: dict[str, Any], *overrides: str) -> Config:
    """The micro run with this `lab:` part."""
    return load_config(MICRO, overrides).model_copy(update={"lab": LabSpec.model_validate(lab)})


def rate(tokens: int, target: int) -> float:
    """Warm-up and cosine."""
    if tokens < WARMUP:
        return PEAK * tokens / WARMUP
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * (tokens - WARMUP) / (target - WARMUP))))


def result(point: Point, seed: int, purpose: str = "report", **changes: Any) -> Result:
    """One training: its loss is MADE_LOSS + GAP_OF_SEED·seed + 0.1 / replicas, its √spread is the learning rate."""
    tokens = point.tokens
    factor = contraction_factor(point.run.outer.alpha, point.run.outer.effective_gamma, replicas=point.replicas)
    noise = random.Random(f"{point}/{seed}")
    loss = MADE_LOSS[point.algorithm] + GAP_OF_SEED * seed + 0.1 / point.replicas
    parted = point.algorithm != "data_parallel" and point.replicas > 1
    moments = [round(tokens * index / 30) for index in range(1, 31)]
    size = 0.05 * (1.0 + factor) * (1 + (point.algorithm == "diloco"))
    values: dict[str, Any] = {
        "variant": point.variant,
        "algorithm": point.algorithm,
        "options": point.options,
        "purpose": purpose,
        "seed": seed,
        "stages": 2,
        "replicas": point.replicas,
        "parameters": 37_024,
        "tokens": tokens,
        "validation_loss": loss,
        "validation_loss_fast": loss + 0.01,
        "validation_loss_merged": loss - 0.005,
        "training_loss": loss - 0.1,
        "diverged": False,
        "curve": [
            MeasuredLoss(tokens=t, validation_loss=loss + 3.0 * math.exp(-12 * t / tokens)) for t in moments[2::3]
        ],
        "spread": [
            MeasuredSpread(
                step=t // 1024,
                tokens=t,
                learning_rate=rate(t, tokens),
                spread=(size * rate(t, tokens) * noise.uniform(0.9, 1.1)) ** 2 if parted else 0.0,
            )
            for t in moments
        ],
        "inner_steps": tokens // 1024,
        "outer_rounds": 8.0,
        "alone_share": 0.125,
        "clipped_share": 0.0,
        "bytes_per_outer_step": 74_048.0,
        "bytes_per_inner_step": 12_341.0,
        "seconds": 3.0,
    }
    return Result.model_validate({**values, **changes})


def made_training(job: Job) -> str:
    """What a worker answers, at once. The loss has its least at γ = 0.6 on the first seed and at 0.4 on others; beyond
    the admissible set training diverges."""
    point = Point("", job.algorithm, {}, {}, job.replicas, job.run, job.world)
    outer = job.run.outer
    if outer.effective_gamma >= 2 * (1 - outer.alpha):
        return diverged(point, job.seed).model_dump_json()
    best = 0.6 if job.seed == 1 else 0.4
    loss = 1.0 + (outer.effective_gamma - best) ** 2 + 0.001 * job.seed
    return result(point, job.seed, validation_loss=loss).model_dump_json()


def no_training(job: Job) -> str:
    """A worker that must not be asked."""
    raise AssertionError(f"{job.key} was trained again")


def refusing(job: Job) -> str:
    """A worker that finds a mistake of the user on seed 2."""
    if job.seed == 2:
        raise UserError(ExitCode.DATA, "data.path is '/nowhere'", "name a text")
    return made_training(job)


def dying(job: Job) -> str:
    """A worker that is killed on seed 2."""
    if job.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return made_training(job)


def diverged(point: Point, seed: int, purpose: str = "report") -> Result:
    """A training whose losses are no numbers."""
    nothing = {"validation_loss": None, "validation_loss_fast": None, "validation_loss_merged": None}
    return result(point, seed, purpose, **nothing, training_loss=None, diverged=True, curve=[])


def record(made: Config, results: list[Result]) -> Results:
    """The whole experiment around its results."""
    return Results(
        command="noloco-node lab micro.yaml --out out",
        versions={"noloco_node": "0", "torch": "2"},
        run=made.run.model_dump(mode="json"),
        lab=made.lab.model_dump(mode="json"),
        results=results,
    )


def points(made: Config) -> Iterator[Point]:
    """All points of the experiment."""
    return (point for cell in expand(made) for point in cell.points)


def everything(made: Config) -> Results:
    """An experiment in which every point was trained; beyond the admissible set it diverged."""
    results: list[Result] = []
    for cell in expand(made):
        purposes = ("tune", "report") if is_tuned(made.lab, cell) else ("report",)
        for purpose in purposes:
            for point in cell.points if purpose == "tune" or len(purposes) == 1 else cell.points[:1]:
                for seed in made.lab.tune_seeds if purpose == "tune" else made.lab.seeds:
                    outer = point.run.outer
                    factor = contraction_factor(
                        outer.alpha, outer.effective_gamma, replicas=point.replicas, momentum=outer.momentum
                    )
                    loss = MADE_LOSS[point.algorithm] + GAP_OF_SEED * seed + 0.1 / point.replicas + 0.1 * factor**2
                    made_one = result(point, seed, purpose, validation_loss=loss)
                    results.append(made_one if factor < 1 else diverged(point, seed, purpose))
    return record(made, results)
