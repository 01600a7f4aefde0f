"""A whole experiment: tune each variant where asked, train what is reported, keep every training as it ends.

An experiment that was cut off goes on where it was.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from noloco_node import __version__, ambient
from noloco_node.config.experiments import LabSpec
from noloco_node.laboratory.expansion import Cell, Job, Point, job_of
from noloco_node.laboratory.figures import Record, Result
from noloco_node.workers import Workers


class _Line(Record):
    key: str
    result: Result
    text: str
    """Fingerprint of the text that was trained on."""
    version: str
    """The release that trained."""


class Journal:
    """The file of finished trainings, one JSON line each: the key of the training, its result and its text."""

    def __init__(self, path: Path, text: str = "") -> None:
        """`text`: fingerprint of the text that is trained on. What was trained on another, or by another release, is
        trained anew."""
        self._path = path
        self._text = text
        self._results: dict[str, Result] = {}
        self._read()

    def get(self, key: str) -> Result | None:
        """The result of the training of that key; None where it has not ended yet."""
        return self._results.get(key)

    def add(self, key: str, result: Result) -> None:
        """Keep a result; it is on the disk when this returns. Raises OSError as the file system does."""
        line = _Line(key=key, result=result, text=self._text, version=__version__).model_dump_json() + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._results[key] = result

    def _read(self) -> None:
        """Take what is there. A last line without its end, left by a crash, is cut off. Results of other versions of
        the record are passed over and trained anew."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        for line in whole.splitlines():
            with contextlib.suppress(ValidationError):
                entry = _Line.model_validate_json(line)
                if (entry.text, entry.version) == (self._text, __version__):
                    self._results[entry.key] = entry.result


Purpose = Literal["tune", "report"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A training that has ended, and what is left."""

    result: Result
    done: int
    total: int
    """Different trainings of the experiment, those found in the journal included."""
    seconds_left: float


OnFinished = Callable[[Finished], None]
Train = Callable[[Job], str]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A training that a cell needs, with why."""

    cell: Cell
    point: Point
    seed: int
    purpose: Purpose


def train(job: Job) -> str:
    """Do one training in this process; the answer is the `Result` as JSON, its labels left empty."""
    import torch

    from noloco_node.laboratory.training import simulate

    torch.set_num_threads(1)
    measured = simulate(
        job.run,
        job.world,
        job.algorithm,
        replicas=job.replicas,
        seed=job.seed,
        evaluations=job.evaluations,
        divergence_points=job.divergence_points,
    )
    labels: dict[str, Any] = {"variant": "", "algorithm": job.algorithm, "options": {}, "purpose": "report"}
    return Result.model_validate({**labels, **dict(measured)}).model_dump_json()


class Experiment:
    """Trains what the cells of a lab file ask for; what the journal holds already is not trained again.

    The results do not depend on the number of workers, but for the seconds that they took.
    """

    def __init__(
        self, lab: LabSpec, cells: Sequence[Cell], journal: Journal, progress: OnFinished, work: Train = train
    ) -> None:
        self._lab = lab
        self._cells = cells
        self._journal = journal
        self._progress = progress
        self._workers: Workers[Job, str] = Workers(lab.workers, work, "lab.workers")
        self._ended: set[str] = set()
        _, self._later = planned(lab, cells)
        self._begun = ambient.monotonic()
        self._done = 0.0
        """Cost of the trainings that have ended in this session, in the unit of `Job.cost`."""

    def run(self) -> list[Result]:
        """Train everything: what is tuned, then what is reported. Results come by cell, in each those of tuning first.
        Raises UserError and RuntimeError as `Workers.run` does; what has ended until then is in the journal."""
        lab, cells = self._lab, self._cells
        tuned = [cell for cell in cells if is_tuned(lab, cell)]
        with self._workers:
            tune = _wanted(((cell, cell.points) for cell in tuned), lab.tune_seeds, "tune")
            self._train(tune, self._later)
            chosen = {cell: (self._best(cell.points),) if cell in tuned else cell.points for cell in cells}
            report = _wanted(chosen.items(), lab.seeds, "report")
            self._train(report, None)
        return [self._result(one) for cell in cells for one in (*tune, *report) if one.cell is cell]

    def _train(self, wanted: Sequence[_Wanted], later: Planned | None) -> None:
        """Train what is missing, longest first; one training serves all cells that ask for the same. What comes `later`
        counts as left."""
        jobs: dict[str, tuple[Job, _Wanted]] = {}
        for one in wanted:
            job = self._job(one.point, one.seed)
            jobs.setdefault(job.key, (job, one))
        missing = [job for key, (job, _) in jobs.items() if self._journal.get(key) is None]
        missing.sort(key=lambda job: (-job.cost, -job.replicas))
        self._ended |= jobs.keys() - {job.key for job in missing}
        left = sum(job.cost for job in missing)
        cost, trainings = (later.cost, later.trainings) if later else (0.0, 0)
        for count, (job, answer) in enumerate(self._workers.run(missing), start=1):
            result = _labelled(Result.model_validate_json(answer), jobs[job.key][1])
            self._journal.add(job.key, result)
            self._ended.add(job.key)
            left -= job.cost
            self._done += job.cost
            seconds = (ambient.monotonic() - self._begun) / self._done * (left + cost)
            total = len(self._ended) + len(missing) - count + trainings
            self._progress(Finished(result, len(self._ended), total, seconds))

    def _job(self, point: Point, seed: int) -> Job:
        return job_of(point, seed, self._lab)

    def _result(self, one: _Wanted) -> Result:
        result = self._journal.get(self._job(one.point, one.seed).key)
        assert result is not None, "its phase is over"
        return _labelled(result, one)

    def _best(self, points: Sequence[Point]) -> Point:
        return min(points, key=lambda point: self._loss(point, self._lab.tune_seeds))

    def _loss(self, point: Point, seeds: Sequence[int]) -> float:
        """Mean validation loss over seeds; infinite where one of them diverged."""
        results = [self._journal.get(self._job(point, seed).key) for seed in seeds]
        losses = [result.validation_loss for result in results if result is not None and not result.diverged]
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        return sum(finite) / len(seeds) if len(finite) == len(seeds) else math.inf


@dataclass(frozen=True, slots=True)
class Planned:
    """What a phase comes to, as far as it can be known before the tuning is decided."""

    trainings: int
    cost: float
    """In the unit of `Job.cost`."""
    tokens: int


def planned(lab: LabSpec, cells: Iterable[Cell]) -> tuple[Planned, Planned]:
    """Trainings and tokens of what is tuned, and of what is reported."""
    counts, costs, tokens = [0, 0], [0.0, 0.0], [0, 0]
    for cell in cells:
        point = cell.points[0]
        if point.algorithm == "data_parallel" and point.replicas != min(lab.replicas):
            continue
        for phase, count in enumerate(_phases(lab, cell)):
            counts[phase] += count
            costs[phase] += count * job_of(point, 0, lab).cost
            tokens[phase] += count * point.tokens
    tune, report = (Planned(*phase) for phase in zip(counts, costs, tokens, strict=True))
    return tune, report


def is_tuned(lab: LabSpec, cell: Cell) -> bool:
    """Whether one of the cell's points is to be chosen."""
    return bool(lab.tune_seeds) and len(cell.points) > 1


def _phases(lab: LabSpec, cell: Cell) -> tuple[int, int]:
    if not is_tuned(lab, cell):
        return 0, len(cell.points) * len(lab.seeds)
    return len(cell.points) * len(lab.tune_seeds), len(lab.seeds)


def _wanted(chosen: Iterable[tuple[Cell, Sequence[Point]]], seeds: Sequence[int], purpose: Purpose) -> list[_Wanted]:
    return [_Wanted(cell, point, seed, purpose) for cell, points in chosen for point in points for seed in seeds]


def _labelled(result: Result, one: _Wanted) -> Result:
    """The numbers of a training under the name of the point that asked for them."""
    point = one.point
    labels = {"variant": point.variant, "options": point.options, "replicas": point.replicas, "purpose": one.purpose}
    if point.algorithm == "data_parallel":  # trained once: gradients, fp32, by a ring all-reduce at every step
        sent = 2 * (point.replicas - 1) / point.replicas * 4 * result.parameters
        labels |= {"bytes_per_outer_step": sent, "bytes_per_inner_step": sent}
    return result.model_copy(update=labels)
