"""An experiment tunes rightly, keeps what has ended, goes on where it was cut off, and ends its workers."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory import experiment
from noloco_node.laboratory.expansion import Job, expand
from noloco_node.laboratory.experiment import Experiment, Finished, Journal, Train
from noloco_node.laboratory.figures import Result
from noloco_node.workers import Workers
from tests.fork_server import forked_workers
from tests.support import eventually
from tests.virtual import made_results as made

GAMMAS = [0.2, 0.4, 0.6, 0.9]


class Here(Workers[Job, str]):
    """No process: what an experiment decides does not depend on who trains. A worker's imports take seconds."""

    def run(self, tasks: Sequence[Job]) -> Iterator[tuple[Job, str]]:
        """See `Workers.run`."""
        return ((task, self._work(task)) for task in tasks)


def sweep(**more: Any) -> dict[str, Any]:
    """A γ sweep beside data parallel."""
    variants = [
        {"name": "data parallel", "algorithm": "data_parallel"},
        {"name": "noloco", "algorithm": "noloco", "sweep": {"outer.gamma": GAMMAS}},
    ]
    return {"variants": variants, "replicas": [4], "workers": 1, **more}


def run(
    lab: dict[str, Any], folder: Path, work: Train | None = None, text: str = ""
) -> tuple[list[Result], list[Finished]]:
    """The results of an experiment, and what was told while it ran. Without `work` this process trains."""
    told: list[Finished] = []
    config = made.config(lab)
    journal = Journal(folder / "runs.jsonl", text)
    with pytest.MonkeyPatch.context() as patched, forked_workers():
        if work is None:
            patched.setattr(experiment, "Workers", Here)
        return Experiment(config.lab, expand(config), journal, told.append, work or made.made_training).run(), told


def rows(results: list[Result], purpose: str) -> list[tuple[Any, int]]:
    """Swept value and seed of noloco's trainings of that purpose."""
    return [(r.options["outer.gamma"], r.seed) for r in results if r.variant == "noloco" and r.purpose == purpose]


def test_all_are_tried_on_all_tune_seeds_and_the_best_mean_is_reported(tmp_path: Path) -> None:
    """0.6 is the best of the first seed and 0.4 of the two others: their mean decides."""
    results, _ = run(sweep(tune_seeds=[1, 2, 3], seeds=[4, 5]), tmp_path)
    assert rows(results, "tune") == [(g, seed) for g in GAMMAS for seed in (1, 2, 3)]
    assert rows(results, "report") == [(0.4, 4), (0.4, 5)]
    assert [(r.seed, r.purpose) for r in results if r.variant == "data parallel"] == [(4, "report"), (5, "report")]


def test_a_point_that_diverges_is_never_chosen(tmp_path: Path) -> None:
    """It is the worst on its seed, though it has no loss."""
    variant = {"name": "noloco", "algorithm": "noloco", "sweep": {"outer.gamma": [2.5, 3.0, 0.9]}}
    lab = {"variants": [variant], "world": {"allow_inadmissible": True}, "tune_seeds": [1], "seeds": [4], "workers": 1}
    results, _ = run({**lab, "reference": "noloco"}, tmp_path)
    assert [r.diverged for r in results] == [True, True, False, False]
    assert rows(results, "report") == [(0.9, 4)]


def test_without_tune_seeds_every_point_is_reported_on_every_seed(tmp_path: Path) -> None:
    """A sweep to be shown, not decided."""
    results, told = run(sweep(seeds=[1, 2]), tmp_path)
    assert rows(results, "report") == [(g, seed) for g in GAMMAS for seed in (1, 2)]
    assert rows(results, "tune") == []
    assert [finished.done for finished in told] == list(range(1, 11))
    assert {finished.total for finished in told} == {10}
    assert told[-1].seconds_left == 0.0
    assert all(finished.seconds_left > 0.0 for finished in told[:-1])


def test_data_parallel_is_trained_once_and_recorded_with_each_number_of_replicas(tmp_path: Path) -> None:
    """The numbers are the same but for what a replica sends: that of the least number of replicas was told of all."""
    results, told = run(sweep(replicas=[4, 8, 16]), tmp_path)
    recorded = [r for r in results if r.variant == "data parallel"]
    assert [r.replicas for r in recorded] == [4, 8, 16]
    sent = {"bytes_per_outer_step": 0.0, "bytes_per_inner_step": 0.0}
    assert len({r.model_copy(update={"replicas": 0, **sent}).model_dump_json() for r in recorded}) == 1
    parameters = recorded[0].parameters
    assert [r.bytes_per_inner_step / (4 * parameters) for r in recorded] == pytest.approx([1.5, 1.75, 1.875])
    assert len([finished for finished in told if finished.result.variant == "data parallel"]) == 1


def test_the_number_of_workers_changes_nothing_in_the_results(tmp_path: Path) -> None:
    """Two processes, or none: the same list."""
    lab = sweep(tune_seeds=[1, 2], seeds=[4, 5], replicas=[4, 8])
    for folder in ("none", "two"):
        (tmp_path / folder).mkdir()
    none, _ = run(lab, tmp_path / "none")
    two, _ = run({**lab, "workers": 2}, tmp_path / "two", made.made_training)
    assert none == two


def test_an_experiment_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """Lines lost, the last one torn: exactly those are trained again, and the results are those of one go."""
    lab = sweep(seeds=[1, 2])
    whole, _ = run(lab, tmp_path)
    journal = tmp_path / "runs.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    journal.write_bytes(b"".join(lines[:6]) + lines[6][:100])
    resumed, told = run(lab, tmp_path)
    assert resumed == whole
    assert [(finished.done, finished.total) for finished in told] == [(n, 10) for n in (7, 8, 9, 10)]
    assert len(journal.read_bytes().splitlines()) == 10


def test_lines_that_are_no_results_are_trained_anew(tmp_path: Path) -> None:
    """A record of another version, or no JSON at all, is passed over."""
    lab = sweep()
    whole, _ = run(lab, tmp_path)
    journal = tmp_path / "runs.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    lines[0], lines[1] = lines[0].replace('"seed"', '"sead"'), "not json\n"
    journal.write_text("".join(lines) + "[1]\n")
    resumed, told = run(lab, tmp_path)
    assert (resumed, len(told)) == (whole, 2)


def test_what_was_trained_on_another_text_is_trained_anew(tmp_path: Path) -> None:
    """The table named the fingerprint of the new text above the losses of the old one."""
    run(sweep(), tmp_path, text="text-1")
    assert [len(run(sweep(), tmp_path, text=text)[1]) for text in ("text-2", "text-2", "text-3")] == [5, 0, 5]


def test_what_another_release_trained_is_trained_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows stood among new ones, under the new release's number."""
    trained: list[int] = []
    for version in ("0.1", "0.2", "0.2"):
        monkeypatch.setattr(experiment, "__version__", version)
        trained.append(len(run(sweep(), tmp_path)[1]))
    assert trained == [5, 5, 0]


def test_an_experiment_that_grows_trains_only_what_is_new(tmp_path: Path) -> None:
    """Another seed, another number of replicas, in the same folder."""
    run(sweep(seeds=[1]), tmp_path)
    _, told = run(sweep(seeds=[1, 2]), tmp_path)
    assert [finished.result.seed for finished in told] == [2] * 5


def test_a_mistake_found_while_training_reaches_the_user_and_keeps_what_has_ended(tmp_path: Path) -> None:
    """The worker's UserError comes out whole."""
    with pytest.raises(UserError) as caught:
        run(sweep(seeds=[1, 2]), tmp_path, made.refusing)
    assert (caught.value.exit_code, caught.value.remedy) == (ExitCode.DATA, "name a text")
    assert len((tmp_path / "runs.jsonl").read_bytes().splitlines()) == 1
    assert multiprocessing.active_children() == []


def test_a_defect_in_a_worker_comes_with_its_traceback(tmp_path: Path) -> None:
    """Not swallowed, not pickled."""
    with pytest.raises(RuntimeError, match="was trained again") as caught:
        run(sweep(), tmp_path, made.no_training)
    assert "Traceback" in str(caught.value)


def test_a_worker_that_is_killed_ends_the_experiment_with_a_remedy(tmp_path: Path) -> None:
    """No hanging: the end of its pipe tells."""
    with pytest.raises(UserError, match="exit code -9") as caught:
        run(sweep(seeds=[1, 2]), tmp_path, made.dying)
    assert "lab.workers" in caught.value.remedy
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
async def test_workers_end_with_the_command_however_it_ends(tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C reaches the whole group, as from a terminal, and has its exit code; a killed parent leaves none behind."""
    command = ["lab", str(made.MICRO), "--out", str(tmp_path / "out"), "--set", "run.inner.target_tokens=50_000_000"]
    command += ["--set", "lab.workers=1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "noloco_node", *command),
        start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        parent = psutil.Process(process.pid)
        await eventually(
            lambda: any(child.cpu_times().user > 1.0 for child in parent.children()), 60, "a worker", every=0.1
        )
        workers = parent.children()
        if sent == signal.SIGINT:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == (ExitCode.INTERRUPTED if sent == signal.SIGINT else -sent)
        assert b"Traceback" not in errors
        await eventually(lambda: not any(worker.is_running() for worker in workers), what="the workers' end", every=0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
