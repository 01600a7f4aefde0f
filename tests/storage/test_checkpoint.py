"""Checkpoints on the disk: what comes back is what was written, of this run and stage, or it does not come back."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from noloco_node.config.settings import canonical_json
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.shared_turns import SharedPosition
from noloco_node.storage import checkpoint
from noloco_node.storage.checkpoint import (
    STATE,
    Checkpoint,
    CheckpointFailed,
    CheckpointFolder,
    HeldSample,
    KeptStanding,
)
from noloco_node.storage.weights import MANIFEST, file_sha256
from noloco_node.training.progress import Mark, Progress

RUN = "f00d" * 8


def standing(clock: float, *, run_id: str = RUN, stage: int = 1) -> KeptStanding:
    """Where a node stands at a clock."""
    return KeptStanding(
        run_id=run_id,
        stage=stage,
        progress=Progress(steps=7, tokens=640, clock=clock, outer_rounds=3, marks=(Mark(6, 576),)),
        credit=-32.5,
        tokens_accumulated=64,
        loss_accumulated=3.25,
        walk=SamplerPosition(epoch=2, offset=5),
        held=(HeldSample(requeues=1),),
        ledger={"drawn": 12, "trained": 11},
    )


def tensors(clock: float) -> dict[str, torch.Tensor]:
    """A state that tells its clock."""
    return {"fast": torch.full((1000,), clock), "optimizer_steps": torch.tensor(7)}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Two checkpoints, of clocks 1 and 2."""
    made = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    for clock in (1.0, 2.0):
        made.write(standing(clock), tensors(clock))
    return made


def test_what_was_written_comes_back(folder: CheckpointFolder) -> None:
    """The newest one: every tensor, count and position."""
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(2.0)
    assert found.standing.progress == standing(2.0).progress
    expected = tensors(2.0)
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], expected[name]) for name in expected)


def test_a_checkpoint_says_of_which_life_of_the_run_it_is(folder: CheckpointFolder) -> None:
    """One that an older release wrote says nothing of it."""
    assert folder.birth(RUN) is None
    folder.write(standing(3.0).model_copy(update={"birth": "b" * 24}), tensors(3.0))
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing.birth == folder.birth(RUN) == "b" * 24
    assert folder.birth("another") is None


def test_the_last_few_stay_and_numbers_never_come_twice(folder: CheckpointFolder) -> None:
    """That holds even if the newest ones were removed by hand in between."""
    for clock in (3.0, 4.0, 5.0):
        folder.write(standing(clock), tensors(clock))
    assert sorted(path.name for path in folder.path.iterdir()) == ["00000003", "00000004", "00000005"]


def test_the_newest_of_a_stage_that_was_left_stays(folder: CheckpointFolder) -> None:
    """However many come of the stage after it; its older ones go."""
    for clock in (3.0, 4.0, 5.0, 6.0):
        folder.write(standing(clock, stage=0), tensors(clock))
    assert sorted(path.name for path in folder.path.iterdir()) == ["00000002", "00000004", "00000005", "00000006"]
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing.progress.clock == 2.0
    newest = folder.newest(RUN, None)
    assert newest is not None
    assert newest.standing.stage == 0


def cut_in_half(path: Path) -> None:
    """As a crash of the machine may leave a file."""
    state = path / STATE
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])


def one_byte_altered(path: Path) -> None:
    """Same length, another weight."""
    content = bytearray((path / STATE).read_bytes())
    content[-5] ^= 1
    (path / STATE).write_bytes(content)


def manifest_altered(path: Path) -> None:
    """A clock that somebody set."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["standing"]["progress"]["clock"] = 9e9
    (path / MANIFEST).write_text(json.dumps(manifest))


def manifest_torn(path: Path) -> None:
    """No JSON any more."""
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:100])


def without_manifest(path: Path) -> None:
    """The file that says what it is is gone."""
    (path / MANIFEST).unlink()


def without_state(path: Path) -> None:
    """The weights are gone."""
    (path / STATE).unlink()


def of_a_later_version(path: Path) -> None:
    """A field that this version does not know."""
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "format": 3}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_in_half, f"{STATE} does not match the hash"),
        (one_byte_altered, f"{STATE} does not match the hash"),
        (manifest_altered, "own seal"),
        (manifest_torn, "ValidationError"),
        (without_manifest, "FileNotFoundError"),
        (without_state, "FileNotFoundError"),
        (of_a_later_version, "another version of noloco-node wrote it"),
    ],
)
def test_a_damaged_one_is_refused_with_the_reason_and_the_one_before_it_is_used(
    folder: CheckpointFolder, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is taken over."""
    damage(folder.path / "00000002")
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(1.0)
    assert float(found.tensors["fast"][0]) == 1.0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(folder.path / "00000002") in line
    assert reason in line


def sealed(folder: CheckpointFolder, content: dict[str, torch.Tensor], **changes: object) -> None:
    """One more checkpoint whose seal and hashes hold, whatever it says."""
    number = len(list(folder.path.iterdir())) + 1
    path = folder.path / f"{number:08d}"
    path.mkdir()
    save_file(content, path / STATE)
    at = standing(float(number))
    at = at.model_copy(update={"progress": replace(at.progress, **changes.pop("progress", {})), **changes})  # type: ignore[arg-type]
    manifest = checkpoint._sealed(at, {STATE: file_sha256(path / STATE)})
    (path / MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json")))


ABSURD: list[tuple[dict[str, torch.Tensor], dict[str, object], str]] = [
    ({"fast": torch.tensor([1.0, math.nan])}, {}, "fast holds NaN or infinity"),
    ({"slow": torch.tensor([-math.inf, math.inf])}, {}, "slow holds NaN or infinity"),
    ({"exp_avg_sq": torch.tensor([1.0, -1.0])}, {}, "exp_avg_sq holds numbers below zero"),
    ({"optimizer_steps": torch.tensor(-5)}, {}, "optimizer_steps holds numbers below zero"),
    ({}, {"progress": {"clock": -1.0}}, "ValidationError"),
    ({}, {"progress": {"clock": 1e300}}, "ValidationError"),
    ({}, {"progress": {"steps": 10**40}}, "ValidationError"),
    ({}, {"progress": {"tokens": -1}}, "ValidationError"),
    ({}, {"progress": {"outer_rounds": 1 << 70}}, "ValidationError"),
    ({}, {"progress": {"marks": (Mark(1 << 60, 0),)}}, "ValidationError"),
    ({}, {"credit": 1e200}, "ValidationError"),
    ({}, {"ledger": {"drawn": -1}}, "ValidationError"),
    ({}, {"tokens_accumulated": 1 << 60}, "ValidationError"),
    ({}, {"stage": 1 << 60}, "ValidationError"),
]


@pytest.mark.parametrize(
    ("content", "changes", "reason"), ABSURD, ids=[f"{number} {row[2]}" for number, row in enumerate(ABSURD)]
)
def test_one_that_nobody_could_go_on_from_is_refused_whoever_sealed_it(
    folder: CheckpointFolder,
    content: dict[str, torch.Tensor],
    changes: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the reason, and the one before it is used."""
    sealed(folder, {**tensors(3.0), **content}, **changes)
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(2.0)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert reason.split(" holds")[0] in line


def test_a_state_that_is_no_number_any_more_pushes_no_sound_one_out(folder: CheckpointFolder) -> None:
    """A node whose weights are lost would else write over all that it could go on from."""
    for _ in range(5):
        with pytest.raises(CheckpointFailed, match="fast holds NaN"):
            folder.write(standing(9.0), {**tensors(9.0), "fast": torch.full((10,), math.nan)})
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(2.0)


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        (standing(3.0, run_id="beef" * 8), f"run {'beef' * 8}, not {RUN}"),
        (standing(3.0, stage=0), "it is of stage 0, and this node serves stage 1"),
    ],
)
def test_one_of_another_run_or_stage_is_refused(
    folder: CheckpointFolder, foreign: KeptStanding, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However whole it is. Where any stage will do, another stage's is as good."""
    caplog.set_level(logging.INFO, "noloco_node")
    folder.write(foreign, tensors(3.0))
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(2.0)
    assert reason in caplog.text
    anywhere = folder.newest(RUN, None)
    assert anywhere is not None
    assert (anywhere.standing.stage, anywhere.standing.run_id) == (0 if foreign.run_id == RUN else 1, RUN)


def test_where_none_is_left_there_is_none(folder: CheckpointFolder, tmp_path: Path) -> None:
    """All damaged, or never written."""
    for path in folder.path.iterdir():
        cut_in_half(path)
    assert folder.newest(RUN, 1) is None
    assert CheckpointFolder(tmp_path / "nowhere", keep=1).newest(RUN, 1) is None


def test_what_a_killed_write_left_is_no_checkpoint(tmp_path: Path) -> None:
    """A node that had that alone passed for one that goes on, and began a run anew that had come to its end."""
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=3)
    assert not folder.holds_any
    (folder.path / ".00000001.partial").mkdir(parents=True)
    (folder.path / "00000001").mkdir()
    assert not folder.holds_any
    folder.write(standing(1.0), tensors(1.0))
    assert folder.holds_any


def test_what_a_killed_write_left_is_removed_by_the_next_one(folder: CheckpointFolder) -> None:
    """It is never read, and does not stay on the disk."""
    left = folder.path / ".00000003.partial"
    left.mkdir()
    (left / STATE).write_bytes(b"half")
    found = folder.newest(RUN, 1)
    assert found is not None
    assert found.standing == standing(2.0)
    folder.write(standing(3.0), tensors(3.0))
    assert sorted(path.name for path in folder.path.iterdir()) == ["00000001", "00000002", "00000003"]


def test_what_the_last_stay_still_writes_is_not_mixed_with_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that moves does not wait for its disk: a manifest of one stage was sealed over tensors of the other."""
    save, begun, go_on = checkpoint.write_tensors, threading.Event(), threading.Event()

    def slowly(*given: Any) -> tuple[str, int]:
        written = save(*given)
        if not begun.is_set():
            begun.set()
            go_on.wait(10.0)
        return written

    monkeypatch.setattr(checkpoint, "write_tensors", slowly)
    folder = CheckpointFolder(tmp_path, 3)
    with ThreadPoolExecutor(3) as pool:
        old = pool.submit(folder.write, standing(1.0, stage=1), tensors(1.0))
        assert begun.wait(10.0)
        new = pool.submit(folder.write, standing(2.0, stage=2), tensors(2.0))
        pool.submit(go_on.wait, 0.2).result()
        go_on.set()
        assert (old.result().path.name, new.result().path.name) == ("00000001", "00000002")
    for stage in (1, 2):
        found = folder.newest(RUN, stage)
        assert found is not None
        assert all(torch.equal(found.tensors[name], value) for name, value in tensors(float(stage)).items())


def test_what_another_release_wrote_beside_what_is_read_belongs_to_the_seal(tmp_path: Path) -> None:
    """A place in a text has fields that come and go; each change of them cost all nodes their checkpoints."""
    folder = CheckpointFolder(tmp_path, keep=1)
    path = folder.write(standing(1.0), tensors(1.0)).path
    written = json.loads((path / "manifest.json").read_text())
    written["standing"]["walk"] = {"row": 8, "base": 3, "taken": "1", "own": [[3, 0]], "time": 7, "left": []}
    seal, found = written.pop("seal"), list[Checkpoint | None]()
    for one in (seal, hashlib.sha256(canonical_json(written).encode()).hexdigest()):
        (path / "manifest.json").write_text(json.dumps({**written, "seal": one}))
        found.append(folder.newest(RUN, None))
    assert found[0] is None, "what was changed afterwards is refused"
    assert found[1] is not None
    assert found[1].standing.walk == SharedPosition(row=8, base=3, taken="1", own=((3, 0),))


def test_a_manifest_that_an_earlier_release_sealed_is_whole(tmp_path: Path) -> None:
    """The seal is over all that a standing has: a field more in it, and every node's checkpoints were damaged."""
    (tmp_path / "00000001").mkdir()
    standing = {
        "run_id": "080d58aa1318bea4deeebefeff6358f4",
        "stage": 1,
        "progress": {
            "steps": 297,
            "tokens": 197632,
            "clock": 285499.2915926023,
            "outer_rounds": 72,
            "marks": [{"steps": 296, "tokens": 196608}],
        },
        "credit": 0.0,
        "tokens_accumulated": 0,
        "loss_accumulated": 0.0,
        "walk": {"epoch": 0, "offset": 0},
        "held": [],
        "ledger": {
            "drawn": 0, "trained": 0, "dropped": 0, "requeued": 0, "retried": 0, "repeated": 0, "served": 772
        },
    }  # fmt: skip
    written = {
        "seal": "7ba37eda7930504458601af0ca6b455a35d9dd3ba0af0280e1647dfef6f530c1",
        "format": 2,
        "version": "0.1.0",
        "written": 1795806999.114904,
        "standing": standing,
        "files": {"state.safetensors": "e9479f6bd67562c8ba39d85513eaf80f53747e746603c1df9f6d2eb55234aefb"},
    }
    (tmp_path / "00000001" / "manifest.json").write_text(json.dumps(written), encoding="utf-8")
    assert CheckpointFolder(tmp_path, 3).birth("080d58aa1318bea4deeebefeff6358f4") is None
