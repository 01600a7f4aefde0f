"""Which saved replicas become the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noloco_node.cli import main
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.merge import in_time
from noloco_node.merge_commands import saved_stages
from noloco_node.model.cut import StageCut
from noloco_node.model.export import load_exported
from noloco_node.model.stage import build_stage
from noloco_node.storage.weights import SavedStage, load_stage, save_stage

CUT = StageCut(index=1, stages=2, first_layer=2, end_layer=4)


def saved(folder: Path, clock: float) -> SavedStage:
    """A replica as it left its weights."""
    weights = {"model.norm.weight": torch.full((3,), clock)}
    save_stage(folder, run_id="ab" * 16, cut=CUT, clock=clock, outer_rounds=1, slow=weights, fast=weights)
    return load_stage(folder)


def test_a_replica_that_left_early_or_came_too_late_is_no_part_of_the_model(tmp_path: Path) -> None:
    """Fellows further apart than max_lag do not average either; the furthest is always there."""
    clocks = (1000.0, 901.0, 899.0, 0.0)
    replicas = [saved(tmp_path / str(clock), clock) for clock in clocks]
    assert [replica.manifest.clock for replica in in_time(replicas, 100)] == [1000.0, 901.0]
    assert in_time(replicas[3:], 100) == replicas[3:]


MICRO = Path(__file__).parent / "configs" / "micro.yaml"
OWN_TEXT = ("run.data.source=text", f"run.data.path={Path(__file__)}")
"""The standard library takes seconds to read."""
RUN = load_config(MICRO, OWN_TEXT).run


def left_by_a_node(folder: Path, stage: int, run: RunSpec = RUN) -> Path:
    """A run folder whose node came to the end at `stage`, with its first weights."""
    module = build_stage(run.model, stage)
    names = module.full_names()
    weights = {names[name]: tensor.detach() for name, tensor in module.named_parameters()}
    final = folder / "final"
    save_stage(final, run_id=run.run_id, cut=module.cut, clock=9.0, outer_rounds=1, slow=weights, fast=weights)
    return folder


def test_folders_of_several_machines_make_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node's folder, one that holds several, and the weights alone: what comes out is what transformers loads."""
    left_by_a_node(tmp_path / "devices" / "cpu-0", 0)
    left_by_a_node(tmp_path / "devices" / "cpu-1", 1)
    alone = left_by_a_node(tmp_path / "friend", 1) / "final"
    out = tmp_path / "out"
    command = ["merge", str(MICRO), str(tmp_path / "devices"), str(alone), "--to", str(out)]
    command += [word for setting in OWN_TEXT for word in ("--set", setting)]
    assert main(command) == ExitCode.OK
    assert "merged 1 of stage 0, 2 of stage 1" in capsys.readouterr().out
    assert (out / "sample.txt").read_text(encoding="utf-8")
    state = dict(load_exported(out / "model").named_parameters())
    expected = build_stage(RUN.model, 0)
    for name, tensor in expected.named_parameters():
        assert torch.equal(state[expected.full_names()[name]], tensor)
    assert main(command) == ExitCode.RUN_FOLDER
    assert "exists already" in capsys.readouterr().err


def test_what_is_no_whole_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A stage that is missing, a folder without weights, weights of another run, a manifest that is torn."""
    first = left_by_a_node(tmp_path / "first", 0)
    (tmp_path / "empty").mkdir()
    other = left_by_a_node(tmp_path / "other", 1, RUN.model_copy(update={"name": "other"}))
    torn = left_by_a_node(tmp_path / "torn", 1)
    (torn / "final" / "manifest.json").write_text("{")
    for folders, code, words in [
        ([first], ExitCode.RUN_FOLDER, "stage 1 of 2"),
        ([first, tmp_path / "empty"], ExitCode.RUN_FOLDER, "holds no final weights"),
        ([first, tmp_path / "nowhere"], ExitCode.RUN_FOLDER, "holds no final weights"),
        ([first, other], ExitCode.WRONG_RUN, "holds weights of run"),
        ([first, torn], ExitCode.RUN_FOLDER, "cannot be read"),
    ]:
        with pytest.raises(UserError) as caught:
            saved_stages(RUN, folders)
        assert (caught.value.exit_code, words in caught.value.message) == (code, True)
