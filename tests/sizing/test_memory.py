"""What a stage takes, part by part, and what of it fits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from noloco_node.config.load import load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.outer.learnt import learnt_bytes
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import Memory, StageMemory, fitting_stages, free_memory, memory_of, planned_memory
from noloco_node.sizing.screen import memory_lines
from noloco_node.training.compute_thread import MOST_AHEAD, ComputeThread
from noloco_node.training.inner_optimizer import InnerOptimizer
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext, carried_dtype
from tests.support import eventually
from tests.training.late_streams import late_copies
from tests.training.made_trainers import checkpoint_of, make_trainer
from tests.training.test_inputs_ahead import held
from tests.worlds import IN_SUBSPACE, WINDOWS, micro_spec, window_batch

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


def needs(run: RunSpec, **settings: int) -> tuple[StageMemory, ...]:
    """The needs of each stage, with four replicas."""
    return memory_of(run, NodeSettings.model_validate(settings), footprint_of(run), 4)


def changed(run: RunSpec, part: str, **values: object) -> RunSpec:
    """The run with other values in one of its groups."""
    return RunSpec.model_validate({**run.model_dump(), part: {**getattr(run, part).model_dump(), **values}})


@pytest.mark.parametrize(
    ("precision", "subspace"), [("fp32", None), ("bf16", IN_SUBSPACE), ("bf16-mixed", IN_SUBSPACE), ("bf16-pure", None)]
)
def test_every_vector_of_a_stage_is_counted(precision: str, subspace: dict[str, object] | None) -> None:
    """Weights, gradient, moments, versions and outer state are what the real objects hold, to the byte."""
    run = changed(micro_spec(stages=2, subspace=subspace), "inner", precision=precision)
    stage = build_stage(run.model, 0)
    trainer = StageTrainer(stage, run.inner, device="cpu", wire_dtype=torch.float32)
    outer = outer_of(run, trainer)
    planned, count = needs(run, in_flight=1)[0], trainer.layout.size
    own = {name: tensor for name, tensor in vars(trainer).items() if isinstance(tensor, torch.Tensor)}
    assert planned.weights == own["master"].nbytes
    assert planned.gradient == own["gradient"].nbytes
    assert planned.moments == 2 * own["master"].nbytes
    version = trainer.versions.current.flat
    kept = {} if stage.subspace is None else {each.data_ptr(): each for each in stage.subspace.buffers()}
    fixed = sum(tensor.nbytes for tensor in kept.values() if tensor.shape != (256, 8))
    assert planned.versions == 2 * version.nbytes + fixed
    vectors = [value for value in vars(outer).values() if isinstance(value, torch.Tensor)]
    assert sum(vector.nbytes for vector in vectors) == (12 if run.outer.alpha else 8) * count
    assert planned.outer == sum(vector.nbytes for vector in vectors) + learnt_bytes(count)


def test_vectors_and_rooms_of_muon_are_counted() -> None:
    """One moment a weight of a matrix, as checkpoints and joiners have it, and what Newton-Schulz works in."""
    run = changed(micro_spec(stages=2), "inner", optimizer="muon")
    trainer = StageTrainer(build_stage(run.model, 1), run.inner, device="cpu", wire_dtype=torch.float32)
    moments, count = sum(trainer.moment_sizes.values()), trainer.layout.size
    assert count < moments < 1.5 * count
    muon = InnerOptimizer(trainer.layout, trainer.master, trainer.gradient, run.inner).muon
    assert muon is not None
    planned = needs(run)[1]
    assert planned.moments + planned.wider == 4 * moments + muon.workspace.nbytes
    plain = needs(changed(run, "inner", optimizer="adamw"))[1]
    assert plain.saved - planned.saved == plain.spooled - planned.spooled == 4 * (2 * count - moments)
    assert footprint_of(run).state_bytes[1] == 4 * (2 * count + moments)


@pytest.mark.parametrize("codec", ["int8", "sign"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
async def test_what_a_checkpoint_and_a_joiner_take_is_counted(codec: str, alpha: float) -> None:
    """On the disk to the byte, with the trail if the codec has one and the momentum if there is any."""
    thread = ComputeThread()
    run = changed(micro_spec(stages=2), "outer", codec=codec, alpha=alpha, gamma=None)
    trainer = StageTrainer(build_stage(run.model, 1), run.inner, device="cpu", wire_dtype=torch.float32)
    worker = StageWorker(run, trainer, outer_of(run, trainer), thread, lambda _: None)
    trainer.tokens_accumulated = 1
    whole = (await checkpoint_of(worker)).tensors
    _, given = await worker.joiner_state()
    await thread.close()
    saved, read = (sum(tensor.nbytes for tensor in state.values() if tensor.dim()) for state in (whole, given))
    assert set(whole) - set(given) == {"gradient"}
    vectors = 4 + (codec == "sign") + (alpha > 0)
    planned = needs(run)[1]
    assert (planned.saved, planned.spooled) == (saved, read)
    assert planned.spooled == 4 * vectors * trainer.layout.size
    assert planned.checkpoint <= planned.saved
    assert planned.on_host == planned.outer + planned.exchange + planned.checkpoint + planned.given


def test_compiling_takes_more_of_the_program_and_compilers_beside_it() -> None:
    """Both are said, whatever the stage, and neither where nothing is compiled."""
    config = load_config(MICRO)
    footprint = footprint_of(config.run)
    told = ["\n".join(memory_lines(load_config(MICRO, [f"node.compile={on}"]), footprint)) for on in ("false", "true")]
    assert "compilers" not in told[0]
    assert "node.compile: compilers beside it take 512.0" in told[1]
    assert "480.0 for the program" in told[0]
    assert "580.0 for the program" in told[1]


def test_small_stages_are_told_in_mib_and_large_ones_in_gib() -> None:
    """Each number that is told shows what it is of: 0.02 GiB could be half as much."""
    small, large = (load_config(name) for name in (MICRO, Path("consumer-8gb")))
    for config, unit, size, digits in ((small, "MiB", 1 << 20, 1), (large, "GiB", 1 << 30, 2)):
        footprint = footprint_of(config.run)
        head, row = (line for line in memory_lines(config, footprint) if "memory in" in line or "stage 0" in line)
        assert f"memory in {unit}" in head
        parts = [float(each.replace(",", "")) for each in row.split()[2:]]
        assert parts[-2] == round(planned_memory(config, footprint)[0].on_device / size, digits)
        assert sum(parts[:-2]) == pytest.approx(parts[-2], abs=4.5 * 10**-digits), "the row adds up"


def test_microbatches_under_way_hold_graphs_or_inputs() -> None:
    """The more of them the more memory, and hardly any where graphs are made anew; the last stage holds none."""
    run = micro_spec(stages=2, layers=6)
    few, many = needs(run, in_flight=1), needs(run, in_flight=4)
    assert few[0].held == 0
    assert many[0].held == 3 * (many[0].held - needs(run, in_flight=3)[0].held)
    assert many[1].held == 0
    assert many[1] == few[1]
    again = needs(changed(run, "inner", backward="recompute"), in_flight=4)[0]
    assert 0 < again.held < many[0].held / 5
    assert again.at_work == many[0].at_work
    layered = needs(changed(run, "inner", backward="checkpoint"), in_flight=4)[0]
    assert again.held < layered.held < many[0].held
    assert layered.at_work < many[0].at_work


def test_a_node_that_chooses_how_many_are_under_way_has_memory_for_as_many_as_it_may_come_to() -> None:
    """Where others leave its share of a step grows, to the whole batch and never beyond."""
    run = changed(micro_spec(stages=2), "inner", global_batch_tokens=3 * micro_spec().microbatch_tokens)
    assert needs(run)[0] == needs(run, in_flight=3)[0] != needs(run, in_flight=2)[0]


def test_a_stage_must_fit_the_device_and_the_host() -> None:
    """Either one alone is not enough; the processor has no memory of its own."""
    small, large = needs(micro_spec(stages=2))[1], needs(micro_spec(stages=1))[0]
    both = (small, large)
    assert large.on_device > small.on_device
    assert large.on_host > small.on_host
    room, processor = (large.total(own_memory=own) for own in (True, False))
    assert fitting_stages(both, room) == [0, 1]
    assert fitting_stages(both, Memory(room.device - 1, room.host)) == [0]
    assert fitting_stages(both, Memory(room.device, room.host - 1)) == [0]
    assert fitting_stages(both, processor) == [0, 1]
    assert fitting_stages(both, Memory(0, processor.host - 1)) == [0]


@pytest.mark.parametrize(("codec", "stage"), [("fp16", 0), ("int8", 1)])
async def test_what_crosses_beside_calls_is_counted_where_a_device_has_memory_of_its_own(
    codec: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte what is sent for a call that waits while the device is busy, and an answer as large; on the processor
    nothing is."""
    run = changed(micro_spec(stages=2), "pipeline", activations=[codec])
    trainer = make_trainer(run, stage)
    trainer.copies, _ = late_copies(monkeypatch)
    sent: list[torch.Tensor] = []
    thread = ComputeThread()
    worker = StageWorker(run, trainer, outer_of(run, trainer), thread, lambda _: None)
    tokens, labels = window_batch(range(WINDOWS))
    between = torch.zeros(*tokens.shape, footprint_of(run).cut_width, dtype=carried_dtype(run.pipeline.activations))
    passage = ForwardContext()
    if stage == 0:
        await worker.forward(tokens, passage)
    monkeypatch.setattr(trainer.copies, "begin", lambda tensor, _wanted: sent.append(tensor))  # pyright: ignore
    async with held(thread):
        call = (
            worker.loss(between, labels.to(torch.int32))
            if stage
            else worker.backward(passage, between, 1.0, tokens.numel())
        )
        asked = asyncio.create_task(call)
        await eventually(lambda: len(sent) == 1 + stage, what="its inputs are sent")
    await asyncio.gather(asked, return_exceptions=True)
    await thread.close()
    planned = needs(run)[stage]
    assert planned.ahead == (MOST_AHEAD + 1) * sum(tensor.nbytes for tensor in sent)
    own, processor = planned.total(own_memory=True), planned.total(own_memory=False)
    crossing = max(planned.correction, planned.coding) + planned.rounding
    assert own.device + own.host == processor.host - planned.wider + 2 * planned.ahead + crossing


def test_this_machine_has_memory_for_a_tiny_model() -> None:
    """The processor has none of its own; the host's is known and finite."""
    free = free_memory("cpu")
    assert free.device == 0
    assert 1 << 20 < free.host < 1 << 50
    assert fitting_stages(needs(micro_spec(stages=2)), free) == [0, 1]
