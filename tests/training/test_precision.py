"""Precisions by name: each is what torch does so, its state survives a copy, and the laboratory computes the same."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from noloco_node.config.run_spec import PrecisionName, RunSpec
from noloco_node.laboratory.stacked import StackedStage
from noloco_node.model.stage import Stage, build_stage
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import PRECISIONS, ForwardContext
from tests.inside import optimizer_of
from tests.training.made_trainers import checkpoint_of, lone_worker, make_trainer
from tests.worlds import IN_SUBSPACE, LENGTH, VOCABULARY, WINDOWS, micro_spec

NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one microbatch."""
    windows = torch.randint(0, VOCABULARY, (WINDOWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1], windows[:, 1:]


def there_and_back(trainers: list[StageTrainer], inputs: Tensor, labels: Tensor) -> float:
    """One microbatch through all stages; the summed loss."""
    passages = [ForwardContext() for _ in trainers[:-1]]
    values = inputs
    for trainer, passage in zip(trainers, passages, strict=False):
        values = trainer.forward(values, passage)
    result = trainers[-1].loss(values, labels)
    gradient = result.input_gradient
    for trainer, passage in zip(reversed(trainers[:-1]), reversed(passages), strict=True):
        assert gradient is not None
        gradient = trainer.backward(passage, gradient, result.loss_sum, result.tokens)
    return result.loss_sum


def gradients(trainers: list[StageTrainer], spec: RunSpec) -> dict[str, Tensor]:
    """What the stages have accumulated, by full name."""
    found: dict[str, Tensor] = {}
    for index, trainer in enumerate(trainers):
        names = build_stage(spec.model, index).full_names()
        found |= {names[name]: part for name, part in trainer.layout.views(trainer.gradient).items()}
    return found


def summed_loss(module: Stage, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(module(inputs).float().flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_mixed_precision_is_torchs_autocast_of_the_whole_model(stages: int) -> None:
    """Loss and every gradient bit for bit, whatever the cut."""
    spec = micro_spec(stages=stages, layers=4, inner={"precision": "bf16-mixed"})
    whole = build_stage(micro_spec(stages=1, layers=4).model, 0)
    inputs, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(whole, inputs, labels)
    loss.backward()
    trainers = [make_trainer(spec, index) for index in range(stages)]
    assert there_and_back(trainers, inputs, labels) == loss.item()
    found, names = gradients(trainers, spec), whole.full_names()
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[names[name]], parameter.grad), name


def test_pure_precision_is_a_model_and_an_optimizer_in_bf16() -> None:
    """Three inner steps of two microbatches, bit for bit those of torch on a module with bf16 weights."""
    spec = micro_spec(stages=1, inner={"precision": "bf16-pure", "clip_norm": 1e9})
    trainer, module = make_trainer(spec, 0), build_stage(spec.model, 0)
    for parameter in module.parameters():  # buffers stay fp32, as where transformers loads a model in bf16
        parameter.data = parameter.data.to(torch.bfloat16)
    parameters, inner = dict(module.named_parameters()), spec.inner
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True)
    for step in range(3):
        tokens = 0
        for part in range(2):
            inputs, labels = batch(10 * step + part)
            loss = summed_loss(module, inputs, labels)
            loss.backward()
            assert trainer.loss(inputs, labels).loss_sum == loss.item()
            tokens += labels.numel()
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / tokens)
        optimizer.step()
        optimizer.zero_grad()
        trainer.step(1e-2)
    assert trainer.master.dtype == torch.bfloat16
    assert torch.equal(trainer.master.float(), trainer.layout.flatten(parameters))


def test_each_precision_learns() -> None:
    """The loss of one microbatch falls as in fp32, in two stages."""
    drops: dict[PrecisionName, float] = {}
    for precision in NAMES:
        trainers = [make_trainer(micro_spec(inner={"precision": precision}), index) for index in range(2)]
        losses: list[float] = []
        for _ in range(12):
            losses.append(there_and_back(trainers, *batch()) / WINDOWS / LENGTH)
            for trainer in trainers:
                trainer.step(1e-2)
        drops[precision] = losses[0] - losses[-1]
    assert drops["fp32"] > 0.5
    assert drops == pytest.approx(dict.fromkeys(drops, drops["fp32"]), rel=0.1)


@pytest.mark.parametrize("precision", NAMES)
async def test_a_copied_state_goes_on_bit_for_bit(precision: PrecisionName) -> None:
    """It travels and lies on disks in fp32 whatever the precision, which loses nothing; slow weights are fp32."""
    spec = micro_spec(stages=1, inner={"precision": precision, "global_batch_tokens": WINDOWS * LENGTH})
    async with lone_worker(spec) as (worker, trainer, _), lone_worker(spec) as (copy, copied, _):
        for seed in range(2):
            await worker.loss(*batch(seed))
        progress, state = await worker.joiner_state()
        assert {t.dtype for name, t in state.items() if name != "optimizer_steps"} == {torch.float32}
        assert worker.outer.slow.dtype == torch.float32
        await copy.load_full_state(progress.clock, 0, state)
        whole = await checkpoint_of(worker)
        await copy.resume(whole)
        assert torch.equal(copied.master, trainer.master)
        losses = [(await each.loss(*batch(5))).loss_sum for each in (worker, copy)]
        assert losses[0] == losses[1]
        assert torch.equal(copied.master, trainer.master)
        assert copied.master.dtype == PRECISIONS[precision].masters


@pytest.mark.parametrize("precision", NAMES)
def test_the_laboratory_computes_what_a_stage_does(precision: PrecisionName) -> None:
    """A row of a stacked stage: gradient and weights after a step, but for the order in which sums are taken."""
    spec = micro_spec(stages=1, inner={"precision": precision})
    trainer, stacked = make_trainer(spec, 0), StackedStage(spec.model, spec.inner, 0, 2)
    inputs, labels = batch()
    trainer.loss(inputs, labels)
    passage = stacked.forward(torch.tensor([0, 1]), torch.stack([inputs, inputs]))
    summed, _ = stacked.with_loss(passage, torch.stack([labels, labels]))
    stacked.backward(summed, None, labels.numel())
    tolerance = 1e-5 if precision == "fp32" else 0.05
    scale = float(trainer.gradient.abs().max())
    for row in stacked.gradient:
        assert row.dtype == PRECISIONS[precision].masters
        assert float((row.float() - trainer.gradient.float()).abs().max()) <= tolerance * scale
        if precision == "bf16-mixed":
            assert torch.equal(row, trainer.gradient)
    stacked.step([0, 1], [1e-3, 1e-3])
    trainer.step(1e-3)
    assert float((stacked.fast[1].float() - trainer.master.float()).abs().max()) <= 2.1e-3


@pytest.mark.parametrize("subspace", [None, IN_SUBSPACE])
def test_the_laboratory_takes_the_steps_of_muon_that_a_stage_takes(subspace: dict[str, object] | None) -> None:
    """Of every replica by itself, at rates by kind, over several steps with momentum and decay."""
    rates = {"optimizer": "muon", "embedding_rate": 4.0, "head_rate": 2.0, "norm_rate": 3.0, "eps": 1e-5}
    spec = micro_spec(stages=1, inner=rates, subspace=subspace)
    stacked = StackedStage(spec.model, spec.inner, 0, 2)
    trainers = [make_trainer(spec, 0) for _ in range(2)]
    begin = trainers[0].master.clone()
    for number in range(4):
        batches = [batch(2 * number + row) for row in range(2)]
        inputs, labels = (torch.stack(each) for each in zip(*batches, strict=True))
        summed, _ = stacked.with_loss(stacked.forward(torch.tensor([0, 1]), inputs), labels)
        stacked.backward(summed, None, labels[0].numel())
        stacked.step([0, 1], [1e-2, 1e-2])
        for trainer, own in zip(trainers, batches, strict=True):
            trainer.loss(*own)
            trainer.step(1e-2)
    for trainer, row in zip(trainers, stacked.fast, strict=True):
        assert (row - trainer.master).norm() < 1e-3 * (trainer.master - begin).norm()
    assert (stacked.fast[0] - stacked.fast[1]).norm() > 0.1 * (stacked.fast[0] - begin).norm()


def test_memory_of_a_parameter_by_precision() -> None:
    """Weights, gradient, two moments and one published version."""
    wanted = {"fp32": 20, "bf16": 18, "bf16-mixed": 20, "bf16-pure": 10}
    for name in NAMES:
        trainer = make_trainer(micro_spec(stages=1, inner={"precision": name}), 0)
        trainer.loss(*batch())
        trainer.step(1e-3)
        tensors = [trainer.master, trainer.gradient, trainer.versions.current.flat]
        moments = [state[key] for state in optimizer_of(trainer).state.values() for key in ("exp_avg", "exp_avg_sq")]
        held = sum(t.nbytes for t in (*tensors, *moments))
        assert held == trainer.layout.size * wanted[name]
