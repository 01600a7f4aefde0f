"""The held-out loss of each source of a mixture: measured in the swarm, and shown wherever the loss of all is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from noloco_node.config.load import load_config
from noloco_node.diagnostics.status import status_lines
from noloco_node.directory.records import PeerState
from noloco_node.exporting.card import model_card
from noloco_node.exporting.evaluation import HeldOut
from noloco_node.exporting.gathered import Gathered
from noloco_node.pipeline.evaluation import Evaluations, evaluate
from noloco_node.report.folder import read_folder
from noloco_node.report.page import page
from noloco_node.telemetry.events import Evaluation as Told
from noloco_node.telemetry.events import EventFile, SourceLoss
from noloco_node.telemetry.logging import describe
from noloco_node.telemetry.metrics import Metrics
from tests.made_runs import MICRO, weights
from tests.telemetry import made_events
from tests.worlds import LENGTH, Drawn, micro_spec, samples_of, window_rows, world

SOURCES = (("web", 5), ("none held out", 0), ("allenai/c4/en", 2))
LOSSES = [SourceLoss(source="web", loss=math.inf, tokens=300), SourceLoss(source="allenai/c4", loss=3.5, tokens=100)]
EVALUATION = Told(time=1060.0, clock=9.0, step=60, loss=math.inf, tokens=400, final=True, sources=LOSSES)


async def test_each_sources_loss_is_measured_through_the_swarm_and_together_they_are_the_whole() -> None:
    """As if each were evaluated alone; a source of which nothing is held out is not told of."""
    rows, told = window_rows(range(7)), list[Told]()
    spec = micro_spec()
    spec = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"windows": 2 * len(rows)})})
    async with world(spec) as made:
        for replica in made.replicas:
            replica.pipeline.open()
            await replica.membership.announce(PeerState.TRAINING)
        head = made.replicas[0]
        await head.membership.refresh()
        assert head.pipeline.origin is not None
        samples = replace(samples_of(Drawn()), held_out=rows, held_out_of=SOURCES)
        await Evaluations(head.pipeline.origin, samples, head.worker, spec, told.append).last()
        alone = [(await evaluate(head.pipeline.origin, own, 4))[0] for own in (rows[:5], rows[5:])]
        [(whole, tokens)] = await evaluate(head.pipeline.origin, rows, 4)
    [evaluation] = told
    assert [(each.source, each.tokens) for each in evaluation.sources] == [
        ("web", 5 * LENGTH),
        ("allenai/c4/en", 2 * LENGTH),
    ]
    assert [each.loss * each.tokens for each in evaluation.sources] == pytest.approx([loss for loss, _ in alone])
    assert (evaluation.loss, evaluation.tokens) == (pytest.approx(whole / tokens), tokens)
    assert evaluation.sources[0].loss != pytest.approx(evaluation.sources[1].loss, rel=1e-4)


def test_it_stands_in_the_log_the_metrics_the_status_and_the_report(tmp_path: Path) -> None:
    """Beside the loss of all, under the source's name."""
    metrics = Metrics()
    metrics.observe(EVALUATION)
    for name, loss in (("web", math.inf), ("allenai/c4", 3.5)):
        assert metrics.registry.get_sample_value("noloco_validation_source_loss", {"source": name}) == loss
    diary = EventFile(tmp_path / "events.jsonl")
    for event in (made_events.started("s0-r0"), made_events.inner_step(60), EVALUATION):
        diary.write(event)
    diary.close()
    told = read_folder(tmp_path, 2000.0)
    assert told.summary.validation_losses_by_source == {"web": math.inf, "allenai/c4": 3.5}
    for shown in (page(told), "\n".join(status_lines(tmp_path, 2000.0)), str(describe(EVALUATION))):
        assert "allenai/c4" in shown
        assert "3.5000" in shown


def test_a_models_card_says_its_loss_on_each_source(tmp_path: Path) -> None:
    """Measured on the windows that the run holds out of each, weighted to what it loses on all."""
    for letter in "ab":
        (tmp_path / letter).mkdir()
        for number in range(60):
            (tmp_path / letter / f"{number}.txt").write_text(letter * 99 + f"{number}\n")
    parts = ", ".join(f"{{source: text, path: {tmp_path / name}, name: letter-{name}}}" for name in "ab")
    run = load_config(MICRO, [f"run.data.mixture=[{parts}]", "run.data.sequence_length=16"]).run
    state: dict[str, Tensor] = {**weights(0, run), **weights(1, run)}
    score = HeldOut(run).score_of(state)
    assert [name for name, _ in score.sources] == ["letter-a", "letter-b"]
    each = [one for _, one in score.sources]
    assert sum(one.tokens for one in each) == score.tokens
    assert score.loss == pytest.approx(sum(one.loss * one.tokens for one in each) / score.tokens)
    card = model_card(Gathered(run, {}, None, "1.0"), {}, 1, "made", score)
    for name, one in score.sources:
        assert f"| of which {name} | {one.loss:.4f} nats per token, over {one.tokens:,} tokens |" in card
    assert "were averaged" not in card, "one replica of each stage is no mean"
