"""Attention that ends at documents: a row of several is to the last digit as if each were alone, in whatever cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.block_reader import StreamedBlocks
from noloco_node.data.encoding import encode
from noloco_node.data.prepared import prepare
from noloco_node.data.reading import held_out_windows
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import Turn
from noloco_node.data.sources import divided
from noloco_node.data.tokenizers import ByteTokenizer
from noloco_node.data.windows import load_windows
from noloco_node.document_marks import BEGINS, inputs_and_labels, positions_of, without_marks
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.stacked import StackedStage, token_losses
from noloco_node.model.cut import PARTS_DOCUMENTS, check_parts_documents
from noloco_node.model.export import evaluate_model, model_of
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.messages import MicrobatchHeader
from noloco_node.sizing.preflight import plan_run
from noloco_node.telemetry.events import Evaluation
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import Message
from tests import worlds
from tests.data.made_files import write_texts
from tests.data.test_sources import text_spec
from tests.model.families import FAMILIES, build_all, parameters_by_full_name, spec_of, token_ids
from tests.reference import each_document_alone, train
from tests.test_exactness import final_weights
from tests.worlds import IN_SUBSPACE, LENGTH, VOCABULARY, WINDOWS, micro_spec, peer_name, run_to_the_end, world

STORIES = [f"tale {number}: " + "and so on, " * (1 + number % 7) for number in range(80)]
BEGINNINGS = ((1, 4, 11), (), (0, 15), (7,))
"""In four rows: where documents begin."""
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "head_dim": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def marks(length: int) -> Tensor:
    """int64 [4, length]."""
    made = torch.zeros(len(BEGINNINGS), length, dtype=torch.int64)
    for row, places in enumerate(BEGINNINGS):
        made[row, list(places)] = BEGINS
    return made


def marked_spec(**changes: Any) -> RunSpec:
    """The micro run, cut at documents."""
    spec = micro_spec(**changes)
    return spec.model_copy(update={"data": spec.data.model_copy(update={"attention": "document"})})


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed."""
    return F.cross_entropy(logits.flatten(0, 1), without_marks(labels).flatten(), reduction="sum")


def test_positions_begin_anew_at_every_mark_and_at_every_row() -> None:
    """Rows without a mark inside need none."""
    labels = torch.full((4, 16), 7) | marks(16)
    positions = positions_of(labels)
    assert positions is not None
    for row, places in enumerate(BEGINNINGS):
        lengths = [b - a for a, b in pairwise(sorted({0, *places, 16}))]
        assert positions[row].tolist() == [place for length in lengths for place in range(length)]
    assert positions_of(labels[1:2]) is None
    assert positions_of(labels[1:3, :15]) is None
    assert torch.equal(without_marks(labels), torch.full((4, 16), 7))


@pytest.mark.parametrize("family", sorted(PARTS_DOCUMENTS))
def test_a_packed_row_is_as_each_document_alone(family: str) -> None:
    """Logits of every stage's cut and gradients of every weight, sliding windows, rotary quirks and experts included;
    and it is not what whole windows give."""
    changes = {} if family in FAMILIES else MORE_FAMILIES.get(family, {})
    inputs, labels = token_ids(batch=4), token_ids(seed=1, batch=4) | marks(16)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for stages in (1, 3):
        parts = build_all(spec_of(family, stages, **changes))
        values = inputs
        for part in parts:
            values = part(values, positions_of(labels))
        loss_of(values, labels).backward()
        gradients = {name: weight.grad for name, weight in parameters_by_full_name(parts).items()}
        results.append((values.detach(), {name: grad for name, grad in gradients.items() if grad is not None}))
    whole = build_all(spec_of(family, 1, **changes))[0]
    logits = each_document_alone(whole.causal, inputs, labels).logits
    loss_of(logits, labels).backward()
    wanted = {name: weight.grad for name, weight in parameters_by_full_name([whole]).items() if weight.grad is not None}
    for values, gradients in results:
        assert torch.allclose(values, logits, atol=2e-6)
        assert gradients.keys() == wanted.keys()
        assert all(torch.allclose(gradients[name], wanted[name], atol=2e-5, rtol=1e-4) for name in wanted)
    assert not torch.allclose(whole(inputs), logits, atol=1e-3)


@pytest.mark.parametrize(
    ("stages", "backward", "subspace"),
    [(1, "keep", None), (3, "recompute", None), (3, "checkpoint", None), (3, "keep", IN_SUBSPACE)],
)
async def test_a_swarm_trains_as_on_separate_documents(
    stages: int, backward: str, subspace: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the whole path: what later stages need travels with the labels. Evaluation goes the same way."""
    rows = worlds.window_rows

    def with_marks(indices: Any) -> Tensor:
        made = rows(indices)
        made[:, :-1] |= torch.roll(marks(LENGTH), min(indices) // WINDOWS % 3, dims=1).to(torch.int32)
        return made

    monkeypatch.setattr(worlds, "window_rows", with_marks)
    spec = marked_spec(stages=stages, steps=8, inner={"backward": backward}, subspace=subspace)
    async with world(spec) as made:
        await run_to_the_end(made)
        weights = await final_weights(made)
        losses, wanted = train(spec, [worlds.window_batch(indices) for indices in made.drawn[0].batches])
        assert len(losses) == 8
        assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < (
            1e-6 if subspace is None else 5e-6
        )
        reported = [event.loss for event in made.events[0] if isinstance(event, Evaluation)]
        told = evaluate_model(model_of(spec.model, wanted), [worlds.window_batch(range(10**6, 10**6 + 4))])
        assert reported[-1] == pytest.approx(told, abs=1e-5)


def packed(labels: Tensor) -> Message:
    """A microbatch for stage 1 of the micro run, but for its header."""
    return Message({}, (torch.zeros(WINDOWS, LENGTH, 32), labels.to(torch.int32)))


@pytest.mark.parametrize(
    ("attention", "labels", "refused"),
    [
        ("document", marks(LENGTH) | 5, False),
        ("document", torch.full((WINDOWS, LENGTH), BEGINS | (VOCABULARY - 1)), False),
        ("document", torch.full((WINDOWS, LENGTH), BEGINS | VOCABULARY), True),
        ("document", torch.full((WINDOWS, LENGTH), -(2**31) | 5), True),
        ("document", torch.full((WINDOWS, LENGTH), BEGINS // 2 | 5), True),
        ("whole", marks(LENGTH) | 5, True),
    ],
)
async def test_any_beginnings_are_taken_where_the_run_has_them_and_nothing_else(
    attention: str, labels: Tensor, refused: bool
) -> None:
    """There is no pattern of them that harms; a label is within the vocabulary with or without."""
    spec = marked_spec() if attention == "document" else micro_spec()
    async with world(spec) as made:
        for replica in made.replicas:
            replica.pipeline.open()
        origin = peer_name(0, 0)
        header = MicrobatchHeader(
            id="a" * 32, budget_ms=1500, run=spec.run_id, stage=1, origin=origin, origin_clock=0.0
        )
        message = replace(packed(labels), header=header.model_dump(mode="json"))
        call = made.replicas[0].context.transport.call(  # pyright: ignore[reportPrivateUsage]
            peer_name(1, 0), microbatch.MICROBATCH.name, message, timeout=5, progress=5, max_answer_bytes=1 << 20
        )
        if not refused:
            assert (await call).header["tokens"] == WINDOWS * LENGTH
            return
        with pytest.raises(Refused) as caught:
            await call
        assert caught.value.reason is Refusal.MALFORMED


@pytest.mark.parametrize("subspace", [None, IN_SUBSPACE])
def test_the_laboratory_trains_as_on_separate_documents(subspace: dict[str, object] | None) -> None:
    """Its replicas share one call, so that it makes the attention mask itself."""
    spec = micro_spec(subspace=subspace)
    inputs, labels = worlds.window_batch(range(4))
    labels |= marks(LENGTH)
    positions = positions_of(labels)
    assert positions is not None
    stages = [StackedStage(spec.model, spec.inner, index, 3) for index in range(2)]
    ids = values = inputs.expand(3, -1, -1)
    for stage in stages:
        values = stage.forward(torch.arange(3), values, positions.expand(3, -1, -1), ids).outputs
    losses = token_losses(values, labels.expand(3, -1, -1))
    whole = build_all(spec.model.model_copy(update={"stages": 1}))[0]
    alone = token_losses(each_document_alone(whole.causal, inputs, labels).logits, labels)
    assert torch.allclose(losses, alone.expand(3, -1, -1), atol=2e-6)


@pytest.fixture
def stories(tmp_path: Path) -> DataSpec:
    """Rows of text, cut at documents."""
    write_texts(tmp_path / "rows.jsonl.gz", STORIES)
    return text_spec(tmp_path / "rows.jsonl.gz", holdout=0.2, attention="document")


def test_marks_are_where_documents_were_packed_and_nowhere_else(stories: DataSpec, tmp_path: Path) -> None:
    """Separators are in the texts, too, and say nothing. The tokens are those of whole windows; a prepared text has the
    same marks, and is not taken for one without."""
    windows = load_windows(stories, 256)
    length = stories.sequence_length + 1
    documents = [encode(document, ByteTokenizer(), stories) for document, held_out in divided(stories) if not held_out]
    begins = np.concatenate([np.arange(len(ids)) == 0 for ids in documents])
    rows = windows.rows(range(windows.train_count))
    assert ((rows & BEGINS) != 0).flatten().tolist() == begins[: windows.train_count * length].tolist()
    without = load_windows(stories.model_copy(update={"attention": "whole"}), 256)
    assert torch.equal(without_marks(rows), without.rows(range(without.train_count)))
    assert torch.equal(without_marks(windows.held_out(9)), without.held_out(9))
    inputs, labels = inputs_and_labels(rows)
    assert int(inputs.max()) < 256
    assert torch.equal(labels & BEGINS, rows[:, :-1].to(torch.int64) & BEGINS)
    prepare(stories, ByteTokenizer(), tmp_path / "tokens")
    held = stories.model_copy(update={"prepared": str(tmp_path / "tokens")})
    assert torch.equal(load_windows(held, 256).rows(range(windows.train_count)), rows)
    with pytest.raises(UserError, match=r"run\.data\.attention 'document'"):
        load_windows(held.model_copy(update={"attention": "whole"}), 256)


def test_a_streamed_text_has_the_marks_of_its_documents(stories: DataSpec) -> None:
    """In windows of a block, from wherever it is read on, and in those held out."""
    spec = stories.model_copy(update={"streaming": True})
    documents = [encode(document, ByteTokenizer(), spec) for document, held_out in divided(spec) if not held_out]
    begins = np.concatenate([np.arange(len(ids)) == 0 for ids in documents])
    length = spec.sequence_length + 1
    blocks = StreamedBlocks(TextShards(spec, ByteTokenizer()), 1, length, marked=True)
    for start in (0, 5):
        rows = np.stack(list(blocks.read(Turn(0, 0, 0, start))))
        assert ((rows & BEGINS) != 0).flatten().tolist() == begins[start * length :][: rows.size].tolist()
        tokens = np.concatenate(documents)[start * length :][: rows.size]
        assert ((rows & (BEGINS - 1)).flatten() == tokens).all()
    held_out = held_out_windows(spec, 256, 4)
    whole = held_out_windows(spec.model_copy(update={"attention": "whole"}), 256, 4)
    assert torch.equal(without_marks(held_out), whole)
    assert bool((held_out & BEGINS).any())


def test_what_is_not_proved_apart_is_refused() -> None:
    """That is so for other architectures by name, sliding windows in the laboratory, and windows too long for an
    attention mask."""
    config = load_config(Path(__file__).parent / "configs" / "micro.yaml", ("run.data.attention=document",))
    plan_run(config.run)
    other = config.run.model.model_copy(
        update={"config": {**config.run.model.config, "model_type": "olmo", "eos_token_id": None}}
    )
    with pytest.raises(UserError, match=r"nothing proves that the 'olmo' architecture") as caught:
        plan_run(config.run.model_copy(update={"model": other}))
    assert caught.value.exit_code is ExitCode.CONFIG
    check_parts_documents(spec_of("llama"), laboratory=True)
    for family in ("mistral", "gemma3_text"):
        with pytest.raises(UserError, match="models without sliding windows only"):
            check_parts_documents(spec_of(family), laboratory=True)
    with pytest.raises(ValueError, match="which is allowed up to 16384"):
        DataSpec(attention="document", sequence_length=20000)
