"""`node.compile`: the run's microbatches by a compiled form, all else by the plain one.

torch's own backend takes a minute: `python -m benchmarks.compiled` holds it to the plain form. Here a backend compiles
nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.document_marks import BEGINS
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import build_stage
from noloco_node.training import placing
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import PlacedStage
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext
from tests.model.families import LAYERS, VOCABULARY, spec_of
from tests.training.made_trainers import make_trainer, moments_of
from tests.worlds import LENGTH, WINDOWS, micro_spec, window_batch

SHAPE = (WINDOWS, LENGTH)


class Counting:
    """A backend that runs the graph as it is."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """As torch.compile calls it, once for each graph."""
        self.graphs += 1

        def run(*values: Tensor) -> Any:
            self.calls += 1
            return graph.forward(*values)

        return run


def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend that finds no compiler."""
    raise RuntimeError("No working C++ compiler found")


def there_and_back(trainer: StageTrainer, number: int) -> list[Tensor]:
    """A microbatch through a first stage: its outputs, and the stage's gradient so far."""
    inputs, _ = window_batch(range(WINDOWS * number, WINDOWS * (number + 1)))
    passage = ForwardContext()
    outputs = trainer.forward(inputs, passage)
    trainer.backward(passage, outputs.sign(), 1.0, inputs.numel())
    return [outputs, trainer.gradient.clone()]


def alike(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) < 1e-6 * float(one.norm())


def small(backward: str) -> RunSpec:
    return micro_spec(layers=2, inner={"backward": backward})


@pytest.mark.parametrize("backward", ["recompute", "checkpoint"])
def test_a_compiled_stage_gives_the_same_numbers_and_compiles_nothing_under_way(backward: str) -> None:
    """Outputs to the bit and gradients to rounding over inner steps, with microbatches under way on older weights. All
    graphs are made beforehand; an evaluation and another shape make none, and take none."""
    plain, compiled = (make_trainer(small(backward), 0) for _ in range(2))
    backend = Counting()
    compiled.compile_for(SHAPE, documents=False, backend=backend)
    made, before = backend.graphs, backend.calls
    assert made == 2  # with a gradient, and without
    assert compiled.tokens_accumulated == 0
    assert not compiled.gradient.any()
    assert compiled.versions.live == 1
    for number in range(3):
        under_way = [ForwardContext(), ForwardContext()]
        for trainer, passage in zip((plain, compiled), under_way, strict=True):
            trainer.forward(window_batch(range(WINDOWS))[0], passage)
        one, other = there_and_back(plain, number), there_and_back(compiled, number)
        assert torch.equal(one[0], other[0])
        assert alike(one[1], other[1])
        for trainer, passage in zip((plain, compiled), under_way, strict=True):
            trainer.step(1e-2)
            trainer.backward(passage, torch.ones(*SHAPE, 32), 1.0, WINDOWS * LENGTH)
        assert alike(plain.gradient, compiled.gradient)
        compiled.load(plain.master, moments_of(plain))  # Adam turns rounding into steps
    assert backend.graphs == made
    calls = backend.calls
    assert calls > before
    inputs, _ = window_batch(range(WINDOWS))
    assert torch.equal(plain.evaluate(inputs), compiled.evaluate(inputs))
    assert torch.equal(plain.forward(inputs[:1], ForwardContext()), compiled.forward(inputs[:1], ForwardContext()))
    assert (backend.graphs, backend.calls) == (made, calls)


def test_documents_apart_are_compiled_as_well() -> None:
    """On the last stage, marked or not: loss and gradients as those of the plain form."""
    spec, backend = micro_spec(layers=2), Counting()
    plain, compiled = (make_trainer(spec, 1) for _ in range(2))
    compiled.compile_for(SHAPE, documents=True, backend=backend)
    made, before = backend.graphs, backend.calls
    inputs = torch.randn(*SHAPE, 32, generator=torch.Generator().manual_seed(1))
    labels = window_batch(range(WINDOWS))[1]
    for marked in (False, True):
        if marked:
            labels = labels.clone()
            labels[:, LENGTH // 2] |= BEGINS
        one, other = plain.loss(inputs, labels), compiled.loss(inputs, labels)
        assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-6)
        assert one.input_gradient is not None
        assert other.input_gradient is not None
        assert alike(one.input_gradient, other.input_gradient)
        assert alike(plain.gradient, compiled.gradient)
    assert (backend.graphs, backend.calls - before) == (made, 2)


def test_checkpointed_layers_of_a_kind_share_what_is_compiled() -> None:
    """Of six layers that attend in two ways two forms are made of each way, with a gradient and without; backward runs
    them again, under the autocast of the forward, and on a thread of its own, as torch has it for a GPU."""
    spec = micro_spec(inner={"backward": "checkpoint", "precision": "bf16-mixed"})
    plain, compiled = (
        StageTrainer(build_stage(spec_of("qwen3", 1), 0), spec.inner, device="cpu", wire_dtype=torch.float32)
        for _ in range(2)
    )
    backend = Counting()
    compiled.compile_for(SHAPE, documents=False, backend=backend)
    made, before = backend.graphs, backend.calls
    inputs, labels = window_batch(range(WINDOWS))
    with ThreadPoolExecutor(1) as other:
        one, same = (other.submit(each.loss, inputs % VOCABULARY, labels % VOCABULARY) for each in (plain, compiled))
        assert one.result().loss_sum == pytest.approx(same.result().loss_sum, rel=1e-6)
    assert alike(plain.gradient, compiled.gradient)
    assert (made, backend.graphs, backend.calls - before) == (4, 4, 2 * LAYERS)


def test_trained_routers_are_refused_with_the_remedy() -> None:
    """Before anything is compiled."""
    stage = build_stage(spec_of("qwen3_moe", 2, output_router_logits=True), 0)
    trainer = StageTrainer(stage, micro_spec().inner, device="cpu", wire_dtype=torch.float32)
    backend = Counting()
    with pytest.raises(UserError, match=r"node\.compile is true, but .*routers") as caught:
        trainer.compile_for(SHAPE, documents=False, backend=backend)
    assert (caught.value.exit_code, caught.value.remedy) == (ExitCode.CONFIG, "set node.compile to false")
    assert not backend.graphs


async def test_a_node_compiles_where_its_owner_says_so_and_one_without_a_compiler_is_told_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At placement, into the run folder; not by default."""
    names_it = f"{tempfile.gettempdir()}/of-a-parent/torchinductor_name"  # as torch does, there with another TMPDIR
    monkeypatch.setenv(placing.CACHE_VARIABLE, names_it)
    monkeypatch.setattr(placing, "INDUCTOR", broken)
    spec, settings = micro_spec(layers=2), NodeSettings(run_folder=tmp_path, compile=True)
    thread = ComputeThread()
    try:
        with pytest.raises(UserError, match=r"node.compile is true.*No working C\+\+ compiler") as caught:
            await placing.on_its_device(spec, settings, build_stage(spec.model, 0), thread)
        assert "g++" in caught.value.remedy
        assert "set node.compile to false" in caught.value.remedy
        assert os.environ[placing.CACHE_VARIABLE] == str(tmp_path / placing.COMPILED)
        plainly = NodeSettings(run_folder=tmp_path)
        await placing.on_its_device(spec, plainly, build_stage(spec.model, 0), thread)
    finally:
        await thread.close()


async def test_what_a_start_that_was_broken_off_left_half_written_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile would load it and fail at every start; what was made whole is kept for the next one."""
    folder = tmp_path / placing.COMPILED
    monkeypatch.setenv(placing.CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    spec, settings = micro_spec(layers=2), NodeSettings(run_folder=tmp_path, compile=True)
    stage, thread = build_stage(spec.model, 0), ComputeThread()
    plain = await placing.on_its_device(spec, NodeSettings(run_folder=tmp_path), stage, thread)
    found: list[set[str]] = []

    async def compiles(*_: object, **__: object) -> PlacedStage:
        """Stands for minutes of torch's own compiler, which is killed the first time."""
        found.append({path.name for path in folder.iterdir()} - {placing.UNFINISHED})
        (folder / f"{len(found)}.so").touch()
        if len(found) == 1:
            raise KeyboardInterrupt
        return plain

    monkeypatch.setattr(placing, "place_stage", compiles)
    with pytest.raises(KeyboardInterrupt):
        await placing.on_its_device(spec, settings, stage, thread)
    for _ in range(2):
        await placing.on_its_device(spec, settings, stage, thread)
    assert found == [set(), set(), {"2.so"}]
    await thread.close()
