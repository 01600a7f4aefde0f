"""Muon's steps: torch's own arithmetic, matrices of experts one by one, state that travels, no memory asked for."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from noloco_node.config.run_spec import InnerSpec
from noloco_node.training.inner_optimizer import InnerOptimizer, Matrices, Muon, Workspace, moment_sizes
from noloco_node.training.layout import FlatLayout, LayoutEntry
from tests.reference import orthogonal
from tests.training.made_trainers import make_trainer, moments_of
from tests.worlds import micro_spec, window_batch

RATE = 0.05


def muon_of(shape: tuple[int, ...], momentum: float = 0.9) -> tuple[Muon, torch.Tensor, torch.Tensor]:
    """One of a single parameter, with its weights and its gradient, flat."""
    entry = LayoutEntry("layer.weight", 0, torch.Size(shape))
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(entry.end, generator=generator)
    gradient = torch.zeros(entry.end)
    return Muon([entry], master, gradient, momentum), master, gradient


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_a_step_is_that_of_torchs_muon(shape: tuple[int, int]) -> None:
    """To the rounding of bf16, in which torch iterates; over several steps, with decay and momentum."""
    own, master, gradient = muon_of(shape)
    theirs = torch.nn.Parameter(master.view(shape).clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=RATE, weight_decay=0.1, momentum=0.9, ns_steps=3, adjust_lr_fn="match_rms_adamw"
    )
    generator = torch.Generator().manual_seed(4)
    before = master.clone()
    for _ in range(4):
        drawn = torch.randn(shape, generator=generator)
        gradient.copy_(drawn.flatten())
        theirs.grad = drawn
        own.step(RATE, 0.1)
        optimizer.step()
    moved = (master - before).norm()
    assert moved > 0.1
    assert (master.view(shape) - theirs.detach()).norm() < 0.02 * moved


def test_matrices_of_experts_are_orthogonalised_one_by_one() -> None:
    """A stack [experts, m, n] is that many matrices, whatever the size of each expert's gradient."""
    own, master, gradient = muon_of((3, 16, 24), momentum=0.0)
    before = master.clone()
    drawn = torch.randn(3, 16, 24) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    gradient.copy_(drawn.flatten())
    own.step(RATE, 0.0)
    wanted = torch.stack([orthogonal(matrix) for matrix in drawn]) * RATE * 0.2 * math.sqrt(24)
    torch.testing.assert_close((before - master).view(3, 16, 24), wanted, rtol=1e-3, atol=1e-5)


def test_zero_gradients_and_no_decay_move_nothing() -> None:
    """Nothing becomes what is no number either."""
    own, master, _ = muon_of((8, 12))
    before = master.clone()
    own.step(RATE, 0.0)
    assert torch.equal(master, before)


def test_a_step_asks_for_no_memory_of_the_size_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rooms are there from the start on: no later step fails half-way on a device that is full."""
    made: list[int] = []
    plain = torch.empty

    def counted(*size: int, **kwargs: object) -> torch.Tensor:
        made.append(math.prod(size))
        return plain(*size, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", counted)
    own, _, gradient = muon_of((32, 48))
    assert sum(made) == 2 * 32 * 48 + 2 * 32 * 32
    gradient.normal_()
    own.step(RATE, 0.1)
    assert sum(made) == 2 * 32 * 48 + 2 * 32 * 32


def test_the_singular_values_of_a_step_lie_near_one() -> None:
    """Whatever those of the gradient, down to a hundredth of its largest."""
    left, _ = torch.linalg.qr(torch.randn(32, 32))
    right, _ = torch.linalg.qr(torch.randn(64, 32))
    matrix = left @ torch.diag(torch.logspace(0, -1.5, 32)) @ right.T
    found = Workspace(32 * 64, 32 * 32, torch.device("cpu")).orthogonal([matrix])[0]
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.2
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("spread", [0.0, 3.0, 7.0])
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 32), (32, 16), (16, 100), (100, 16)])
def test_wide_and_tall_matrices_come_out_as_others_do(shape: tuple[int, int], spread: float) -> None:
    """Also where the singular values lie so many powers of ten apart, whose squares 32 bits do not hold together."""
    short = min(shape)
    left, right = (torch.linalg.qr(torch.randn(2, size, short, dtype=torch.float64))[0] for size in shape)
    matrices = left @ torch.diag(torch.logspace(0, -spread, short, dtype=torch.float64)) @ right.mT
    found = Workspace(matrices.numel(), 2 * short**2, torch.device("cpu")).orthogonal(list(matrices.float()))
    for own, matrix in zip(found, matrices, strict=True):
        torch.testing.assert_close(own.double(), orthogonal(matrix), rtol=0.0, atol=2e-5)


def test_one_moment_of_the_matrices_is_kept() -> None:
    """Four bytes a weight less in memory, on the wire and on disk, and the state goes on where it was taken."""
    spec = micro_spec(stages=1, inner={"optimizer": "muon", "embedding_rate": 2.0})
    trainer, other = make_trainer(spec, 0), make_trainer(spec, 0)
    matrices = [entry for entry in trainer.layout.entries if entry.kind == "matrix"]
    squares = trainer.layout.size - sum(entry.shape.numel() for entry in matrices)
    assert 0 < squares < trainer.layout.size / 2
    assert trainer.moment_sizes == {"exp_avg": trainer.layout.size, "exp_avg_sq": squares}
    for first in range(3):
        trainer.loss(*window_batch(range(first, first + 4)))
        trainer.step(1e-2)
    state = moments_of(trainer)
    assert all(bool(state[name].any()) for name in trainer.moment_sizes)
    other.load(trainer.master, state)
    for each in (trainer, other):
        each.loss(*window_batch(range(4)))
        each.step(1e-2)
    assert torch.equal(trainer.master, other.master)
    assert int(moments_of(other)["optimizer_steps"]) == 4


def test_a_stage_without_matrices_is_adamws_alone() -> None:
    """One of nothing but matrices is Muon's."""
    inner = micro_spec(inner={"optimizer": "muon"}).inner
    for parameters in (
        {"embed_tokens.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)},
        {"w": torch.ones(4, 4)},
    ):
        layout = FlatLayout.of(parameters)
        master, gradient = torch.ones(layout.size), torch.ones(layout.size)
        optimizer = InnerOptimizer(layout, master, gradient, inner)
        assert (optimizer.muon is None) == ("w" not in parameters)
        optimizer.step(1e-2)
        assert bool((master < 1.0).any())
        assert {name: len(vector) for name, vector in optimizer.state().items() if vector.dim()} == moment_sizes(
            layout, inner
        )


def test_a_multiplier_of_the_rate_leaves_the_decay_as_it_is() -> None:
    """With a gradient of zero only the decay is left of a step."""
    inner = micro_spec(inner={"embedding_rate": 10.0, "weight_decay": 0.5}).inner
    layout = FlatLayout.of({"embed_tokens.weight": torch.ones(4, 4), "w": torch.ones(4, 4), "norm": torch.ones(4)})
    master, gradient = torch.ones(layout.size), torch.zeros(layout.size)
    InnerOptimizer(layout, master, gradient, inner).step(1e-2)
    assert torch.allclose(master[:32], torch.full((32,), 1.0 - 1e-2 * 0.5))
    assert torch.equal(master[32:], torch.ones(4))


@pytest.mark.parametrize("value", [0.0, 1000.0, math.nan])
@pytest.mark.parametrize("name", ["embedding_rate", "head_rate", "norm_rate"])
def test_multipliers_beyond_reason_are_refused(name: str, value: float) -> None:
    """By name, with what is allowed."""
    with pytest.raises(ValidationError, match=rf"{name}\n.*(greater than 0|less than or equal to 100|a finite number)"):
        InnerSpec.model_validate({"target_tokens": 2, "global_batch_tokens": 1, name: value})


def test_a_decay_that_turns_weights_around_is_refused() -> None:
    """The rate times the decay is what a step takes of each weight."""
    with pytest.raises(ValueError, match=r"run\.inner\.weight_decay"):
        InnerSpec(target_tokens=2, global_batch_tokens=1, learning_rate=20.0, weight_decay=0.1)


def test_experts_and_layers_are_counted_as_matrices() -> None:
    """The cost of a step: of each iteration two products m × m × n and one m × m × m."""
    matrices = Matrices.of(LayoutEntry("experts.gate_up_proj", 0, torch.Size((8, 64, 16))))
    assert (matrices.count, matrices.short, matrices.long) == (8, 16, 64)
    assert matrices.flop == 3 * 8 * (4 * 16 * 16 * 64 + 2 * 16**3)
