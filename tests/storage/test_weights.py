"""Saved weights come back bit for bit, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import StageCut
from noloco_node.storage.weights import MANIFEST, SLOW_FILE, file_sha256, load_slow, read_manifest, save_stage

CUT = StageCut(index=1, stages=2, first_layer=2, end_layer=4)


def tensors(seed: int) -> dict[str, Tensor]:
    """A matrix that is a view, and a vector."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.layers.2.mlp.up_proj.weight": torch.randn(5, 7, generator=generator).t(),
        "model.norm.weight": torch.randn(7, generator=generator).requires_grad_(),
    }


def save(folder: Path, clock: float = 12345.678901234567) -> None:
    """A stage on disk."""
    save_stage(folder, run_id="ab" * 16, cut=CUT, clock=clock, outer_rounds=7, slow=tensors(1))


def test_a_stage_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Slow weights, their names, the cut, the clock to its last digit."""
    save(tmp_path / "final")
    manifest = read_manifest(tmp_path / "final")
    read, written = load_slow(tmp_path / "final"), tensors(1)
    assert set(read) == set(written)
    assert all(torch.equal(read[name], written[name]) for name in written)
    assert manifest.files["slow.safetensors"] == file_sha256(tmp_path / "final" / SLOW_FILE)
    assert StageCut(manifest.stage, manifest.stages, manifest.first_layer, manifest.end_layer) == CUT
    assert (manifest.clock, manifest.outer_rounds) == (12345.678901234567, 7)
    assert manifest.run_id == "ab" * 16
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == sorted([MANIFEST, SLOW_FILE])


def test_saving_again_replaces_the_former_weights(tmp_path: Path) -> None:
    """The second state is read, and nothing else is left."""
    save(tmp_path / "final")
    save(tmp_path / "final", clock=99.0)
    assert read_manifest(tmp_path / "final").clock == 99.0
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def remove(name: str) -> Callable[[Path], None]:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    """Cut a file in half."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def flip_last_bit(name: str) -> Callable[[Path], None]:
    """Change one bit of the last tensor."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(bytes(content))

    return damage


def swap_weights(folder: Path) -> None:
    """Another stage's: the file is well-formed."""
    other = {name: tensor.detach().contiguous() for name, tensor in tensors(2).items()}
    save_file(other, folder / SLOW_FILE)


def change_clock(folder: Path) -> None:
    """A manifest edited by hand."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "clock": 1.0}))


@pytest.mark.parametrize(
    "damage",
    [
        *(remove(name) for name in (MANIFEST, SLOW_FILE)),
        *(truncate(name) for name in (MANIFEST, SLOW_FILE)),
        flip_last_bit(SLOW_FILE),
        swap_weights,
        change_clock,
    ],
)
def test_torn_or_altered_weights_are_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Whatever was done to the files, the reader says so instead of training on them."""
    folder = tmp_path / "final"
    save(folder)
    load_slow(folder)
    damage(folder)
    with pytest.raises(UserError, match="damaged or incomplete") as caught:
        load_slow(folder)
    assert caught.value.exit_code is ExitCode.RUN_FOLDER


def test_a_disk_that_refuses_is_a_users_error(tmp_path: Path) -> None:
    """A file where a parent folder should be."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be saved") as caught:
        save(tmp_path / "file" / "final")
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
