"""Parts of the daemon that need no network: what it checks before p2pd starts, and what it saves when it fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from noloco_node.bootstrap.spec_fetch import RunHasEnded
from noloco_node.config.load import load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import MAX_BODY_BYTES, check_microbatch_bytes
from noloco_node.errors import ExitCode, UserError
from noloco_node.node import journey
from noloco_node.node import network as network_module
from noloco_node.node.daemon import run_node
from noloco_node.node.interrupts import Interrupts
from noloco_node.node.network import out_of_reach
from noloco_node.node.stay import run_and_save
from noloco_node.sizing.preflight import plan
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.training.compute_device import check_device, idle_gpu
from tests.support import one_turn
from tests.test_checkpointing import lone_node
from tests.worlds import micro_spec

MICRO = Path(__file__).parent / "configs" / "micro.yaml"


@pytest.mark.parametrize("was_paused", [True, False])
async def test_a_run_that_ends_while_a_node_is_paused_is_no_failure_of_it(
    was_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed after the end it stopped as failed, with the exit code of one that comes for the first time."""
    place: Any = SimpleNamespace(stays=SimpleNamespace(moving=None), was_paused=was_paused)
    departure: Any = SimpleNamespace(show=None, started=0.0)

    async def nothing(*_: object) -> int:
        return 0

    @contextlib.asynccontextmanager
    async def entered(*_: object) -> AsyncGenerator[Any]:
        yield place

    @contextlib.asynccontextmanager
    async def comes_too_late(*_: object) -> AsyncGenerator[Any]:
        raise RunHasEnded(ExitCode.NO_STATE_SOURCE, "it has come to its end", "start a new one")
        yield

    for name, stand_in in (("_enter", entered), ("_obtain", comes_too_late), ("_choose", nothing), ("_rest", nothing)):
        monkeypatch.setattr(journey, name, stand_in)
    travelling = journey.travel(departure, departure, Interrupts())
    if not was_paused:
        with pytest.raises(RunHasEnded):
            await travelling
        return
    stopped = await travelling
    assert (stopped.reason, stopped.detail) == (
        "target_reached",
        "the run has come to its end while this node was paused",
    )


async def test_a_second_pause_in_a_row_loses_nothing_of_what_a_full_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that was kept in memory is resumed, and the node is paused again before it has looked where to begin. An
    older checkpoint from the disk took its place, or none."""
    spec, folder = micro_spec(stages=1), CheckpointFolder(tmp_path / "checkpoints", keep=2)
    folder.path.write_text("in the way")

    @contextlib.asynccontextmanager
    async def arriving(_stage: int) -> AsyncGenerator[None]:
        yield

    stays = SimpleNamespace(arriving=arriving, signed=SimpleNamespace(kept_in=print), near=False, moving=None)
    net = SimpleNamespace(spec=spec, settings=NodeSettings(), known=SimpleNamespace(holders=lambda *_: ()))
    node: Any = SimpleNamespace(stays=stays, net=net, folder=None, checkpoints=folder)
    node.pause, node.paused, node.was_paused = SimpleNamespace(rests=False), False, True
    node.started, resumed = True, list[Checkpoint]()

    @contextlib.asynccontextmanager
    async def entered(*_: object) -> AsyncGenerator[Any]:
        yield node

    async def chosen(*_: object) -> int:
        return 0

    async def paused(*_: object) -> None:
        node.paused = True

    async with lone_node(spec, folder) as life:

        async def enters(*_: object) -> tuple[Any, float]:
            resumed.append(node.saved)
            if len(resumed) == 3:
                raise RunHasEnded(ExitCode.NO_STATE_SOURCE, "it has come to its end", "start a new one")
            saved, node.saved = node.saved, None
            await life.keeper.resume(saved)
            return SimpleNamespace(keeper=life.keeper, replica=life.replica), saved.standing.progress.clock

        await life.train(3)
        node.saved = await life.keeper.save_or_keep()
        stand_ins = {"_enter": entered, "_choose": chosen, "_enter_stage": enters, "_first_state": paused}
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(journey, name, stand_in)
        departure: Any = SimpleNamespace(show=None, started=0.0)
        await journey.travel(departure, departure, Interrupts())
    first, *again = resumed
    assert len(again) == 2
    for each in again:
        assert each.standing == first.standing
        assert all(torch.equal(each.tensors[name], tensor) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "meta", f"cuda:{torch.cuda.device_count()}", ""])
def test_a_device_that_is_not_there_is_refused_by_name(name: str) -> None:
    """A misspelt one, one that holds no numbers, and a GPU that this machine does not have."""
    with pytest.raises(UserError, match=f"node.device is '{name}'") as caught:
        check_device(name)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "cpu" in caught.value.remedy


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_the_processor_is_always_there(name: str) -> None:
    """It passes by its name, and the default passes on any machine."""
    check_device(name)


@pytest.mark.parametrize(
    ("files", "built", "said"),
    [
        ([], "12.8", None),
        (["dev/nvidiactl", "dev/nvidia-uvm"], "12.8", None),
        (["dev/nvidia0"], None, "is built without CUDA"),
        (["proc/driver/nvidia/gpus/0000:01:00.0"], "12.8", "not shown to this container"),
        (["dev/nvidia0", "proc/driver/nvidia/gpus/0000:01:00.0"], "12.8", "driver on your system is too old"),
    ],
)
def test_a_gpu_that_the_default_device_leaves_idle_is_told_of(
    files: list[str], built: str | None, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told with the reason and the remedy: a user that rents it would train on the processor. It is not told if
    the processor was named."""

    def fails() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.setattr(torch.version, "cuda", built)
    for file in files:
        (tmp_path / file).mkdir(parents=True)
    found = idle_gpu("auto", tmp_path)
    assert (found is None) == (said is None)
    assert idle_gpu("cpu", tmp_path) is None
    if found and said:
        assert said in found[0]
        assert "\n" not in "".join(found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert idle_gpu("auto", tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "joined", "warned"),
    [
        ({}, ["203.0.113.7"], True),
        ({"host": "::1"}, ["127.0.0.1", "203.0.113.7"], True),
        ({}, ["127.0.0.1"], False),
        ({}, [], False),
        ({"host": "0.0.0.0"}, ["203.0.113.7"], False),
        ({"announce": ("/ip4/203.0.113.8/tcp/1",)}, ["203.0.113.7"], False),
    ],
)
def test_a_node_that_only_its_own_machine_reaches_is_warned_where_it_joins_others(
    settings: dict[str, object], joined: list[str], warned: bool
) -> None:
    """It could dial and never be dialled."""
    peer = "12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"
    addresses = [f"/ip4/{host}/tcp/1/p2p/{peer}" for host in joined]
    assert out_of_reach(NodeSettings.model_validate(settings), addresses) is warned


async def test_who_only_looks_on_is_not_told_that_others_cannot_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`watch`, `eval` and `export` were told to listen elsewhere, and nobody calls them."""
    elsewhere = "/ip4/203.0.113.7/tcp/1/p2p/12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"
    daemon = SimpleNamespace(joined_peers=(elsewhere,), daemon=SimpleNamespace(joined_peers=(elsewhere,)), known=None)

    @contextlib.asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncGenerator[Any]:
        yield daemon

    def ends(*_: object) -> Any:
        raise EOFError

    monkeypatch.setattr(network_module, "running_p2p", opened)
    monkeypatch.setattr(network_module, "line_of", ends)
    with pytest.raises(EOFError):
        async with network_module.looking_on(NodeSettings()):
            pass
    assert "other machines cannot reach this node" not in caplog.text
    monkeypatch.setattr(network_module, "entrance", opened)
    with pytest.raises(EOFError):
        async with network_module.network(ends, NodeSettings(), RunFolder(tmp_path), run=None):
            pass
    assert "other machines cannot reach this node" in caplog.text


def test_a_microbatch_that_no_peer_would_accept_is_refused_before_the_start() -> None:
    """Validation and the node's start use the same bound; the remedy's number fits, one more does not."""
    long = ["run.data.sequence_length=65536", "run.inner.global_batch_tokens=1e9", "run.inner.target_tokens=1e10"]
    long.append("run.model.config.max_position_embeddings=65536")
    with pytest.raises(UserError, match=r"run\.inner\.microbatch_windows is 4096") as caught:
        plan(load_config(MICRO, [*long, "run.inner.microbatch_windows=4096"]))
    assert caught.value.exit_code is ExitCode.CONFIG
    fitting = int(caught.value.remedy.split()[3])
    plan(load_config(MICRO, [*long, f"run.inner.microbatch_windows={fitting}"]))
    run = load_config(MICRO, [*long, f"run.inner.microbatch_windows={fitting + 1}"]).run
    with pytest.raises(UserError):
        check_microbatch_bytes(run, int(str(run.model.config["hidden_size"])))
    with pytest.raises(UserError, match="bytes on the wire") as caught:
        check_microbatch_bytes(run, MAX_BODY_BYTES)
    assert "sequence_length" in caught.value.remedy


def test_the_plan_counts_bytes_by_codec() -> None:
    """Of all weights in an outer step."""
    parameters = plan(load_config(MICRO, [])).stage_parameters
    halves = plan(load_config(MICRO, ["run.outer.codec=fp16"]))
    assert halves.outer_bytes == tuple(2 * count for count in parameters)
    codes = plan(load_config(MICRO, ["run.outer.codec=int4"]))
    for count, total in zip(parameters, codes.outer_bytes, strict=True):
        assert 0.5 * count <= total <= 0.6 * count, "half a byte a weight, and the sketch"


@pytest.mark.parametrize("rescue", [None, OSError("disk full")])
async def test_a_run_that_fails_saves_its_weights_and_fails_with_its_own_error(rescue: OSError | None) -> None:
    """Whether the rescue succeeds or not."""
    saves: list[str] = []

    async def run() -> None:
        raise UserError(ExitCode.P2P_DAEMON, "p2pd died", "start again")

    async def save() -> None:
        saves.append("saved")
        if rescue:
            raise rescue

    with pytest.raises(UserError, match="p2pd died"):
        await run_and_save(run(), save)
    assert saves == ["saved"]


async def test_a_cancelled_run_saves_nothing_and_a_finished_one_saves_once() -> None:
    """The second signal means at once."""
    saves: list[str] = []

    async def save() -> None:
        saves.append("saved")

    task = asyncio.create_task(run_and_save(asyncio.Event().wait(), save))  # pyright: ignore[reportArgumentType]
    await one_turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert saves == []
    await run_and_save(asyncio.to_thread(lambda: None), save)
    assert saves == ["saved"]


@pytest.mark.parametrize(
    ("stages", "words"), [(1, "its weights are in"), (2, "the weights of this node's stage, one of 2, which only")]
)
async def test_a_run_that_is_over_says_whether_the_weights_are_all_of_the_model(
    stages: int, words: str, tmp_path: Path
) -> None:
    """One stage of several is not the model."""
    spec = load_config(MICRO, [f"run.model.stages={stages}"]).run
    RunFolder(tmp_path).mark_ended(spec.run_id, spec.name)
    with pytest.raises(UserError, match=words) as caught:
        await run_node(spec, NodeSettings(run_folder=tmp_path))
    assert caught.value.exit_code is ExitCode.RUN_FOLDER
