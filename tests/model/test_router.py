"""What the stages' routers tell each other, and what cannot be true of it."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from noloco_node.directory.records import PeerState
from noloco_node.model.router import Router
from noloco_node.model.stage import build_stage
from noloco_node.pipeline.messages import MicrobatchAnswer, MicrobatchHeader, read_answer
from noloco_node.transport.calls import Answer, BadAnswer
from noloco_node.transport.errors import Refused
from tests.model.families import spec_of
from tests.worlds import micro_spec, peer_name, world

ROUTER = Router(experts=4, chosen=2, coefficient=0.5, layers=3, layers_before=1)


def test_parts_of_stages_add_up_to_the_loss_of_all_layers() -> None:
    """Value and gradient are those of transformers' function over all layers at once."""
    logits = [torch.randn(10, 4, requires_grad=True) for _ in range(3)]
    whole = load_balancing_loss_func(tuple(logits), 4, 2)
    expected = torch.autograd.grad(0.5 * 10 * whole, logits)
    routed = [ROUTER.routed(part, torch.device("cpu")) for part in (logits[:1], logits[1:])]
    chosen = sum((one.chosen for one in routed), torch.zeros(4, dtype=torch.int64))
    parts = [ROUTER.loss(one.chances, chosen, 10) for one in routed]
    assert torch.allclose(torch.stack(parts).sum(), 0.5 * 10 * whole, rtol=1e-6)
    found = torch.autograd.grad(parts, logits)
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("chosen", "sound"),
    [
        ((30, 10, 10, 10), True),
        ((30, 30, 0, 0), True),
        ((31, 29, 0, 0), False),
        ((10, 10, 10, 10), False),
        ((30, 30), False),
        ((), False),
    ],
)
def test_counts_of_experts_that_cannot_be_are_refused(chosen: tuple[int, ...], sound: bool) -> None:
    """Ten tokens that go to two experts in each of three layers: sixty choices, at most thirty of one expert."""
    assert ROUTER.whole(chosen, 10) is sound
    answer = Answer(MicrobatchAnswer(loss_sum=1.0, tokens=10, load=0, chosen=chosen), (torch.zeros(1, 10, 8),), (0.0,))
    if sound:
        assert read_answer(answer, torch.zeros(1, 10, 8), ROUTER).chosen == chosen
    else:
        with pytest.raises(BadAnswer, match="counts of chosen experts"):
            read_answer(answer, torch.zeros(1, 10, 8), ROUTER)
    assert not ROUTER.before(chosen, 10)
    assert ROUTER.before((10, 10, 0, 0), 10)


def test_each_stage_knows_where_the_experts_are() -> None:
    """Layers without experts do not count, and a model that is not asked to trains no routers."""
    mixture = {"mlp_only_layers": [0, 3], "output_router_logits": True}
    found = [build_stage(spec_of("qwen3_moe", 3, **mixture), index).router for index in range(3)]
    assert all(one is not None and (one.layers, one.experts, one.chosen) == (4, 4, 2) for one in found)
    assert [one and one.layers_before for one in found] == [0, 1, 2]
    assert build_stage(spec_of("qwen3_moe", 3), 1).router is None
    assert build_stage(spec_of("llama", 3), 1).router is None


async def test_a_request_with_counts_that_cannot_be_is_refused() -> None:
    """The stage before has chosen two experts for each token of its layer with experts, no more and no less."""
    spec = micro_spec(stages=2)
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    model = spec.model.model_copy(update={"config": spec.model.config | mixture})
    spec = spec.model_copy(update={"model": model})
    async with world(spec) as made:
        first, last = made.replicas
        header = MicrobatchHeader(
            id="0" * 32,
            budget_ms=10_000,
            run=spec.run_id,
            stage=1,
            origin=peer_name(0, 0),
            origin_clock=64.0,
            chosen=(64, 64, 64, 65),
        )
        tensors = torch.zeros(4, 16, 32), torch.zeros(4, 16, dtype=torch.int32)
        with pytest.raises(Refused, match="counts of chosen experts"):
            await last.pipeline.server.handle(peer_name(0, 0), header, tensors)
        assert last.worker.trained_tokens == 0
        last.pipeline.open()
        await last.membership.announce(PeerState.TRAINING)
        await first.membership.refresh()
        assert first.pipeline.origin is not None
        assert await first.pipeline.origin.train_one()
        assert last.worker.trained_tokens == 64
