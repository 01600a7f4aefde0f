"""The model card: what a person should know that finds an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from noloco_node import __version__
from noloco_node.config.data_spec import NO_TOKENIZER, PASS_WINDOWS, DataSpec, MixedSource, apportioned
from noloco_node.config.load import render
from noloco_node.config.run_spec import RunSpec
from noloco_node.exporting.evaluation import Score
from noloco_node.exporting.gathered import Gathered, SavedReplica
from noloco_node.telemetry.node_state import MOST_NODES
from noloco_node.telemetry.words import as_trained

S = TypeVar("S", DataSpec, MixedSource)

NAME = "README.md"
REPORTED = (
    "What the swarm reports it measures while it trains, with the weights of single replicas, at the named tokens.",
    "This comes to the model's own loss where the learning rate has come to nothing; before, it differs by what it",
    "learns meanwhile and by what averaging makes of it.",
)
OWNERS = "(the owner's)"
"""This stands in place of a path on the owner's machine."""


def model_card(
    gathered: Gathered,
    used: Mapping[int, Sequence[SavedReplica]],
    parameters: int,
    title: str,
    score: Score | None = None,
) -> str:
    """A Hugging Face model card with the run's facts. `used` are the replicas behind each stage; `score` is the model's
    own, where it is known."""
    run = gathered.run
    facts = [*_facts(gathered, used, parameters), *_worth(gathered, score)]
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [noloco, decentralized-training]",
            "---",
            "",
            f"# {_plain(title)}",
            "",
            "A causal language model, trained by nodes that averaged their weights in random pairs (NoLoCo,",
            "arXiv 2506.10911) and met over hivemind's directory. Its weights are slow weights, fp32.",
            "",
            "```python",
            *_how_to_load(gathered.run.data.tokenizer != NO_TOKENIZER),
            "```",
            "",
            "| | |",
            "|---|---|",
            rows,
            "",
            "## What it is made of",
            "",
            *_made_of(used),
            "",
            "Tokens count those of the whole swarm." + _averaged(used),
            "",
            *REPORTED,
            "",
            "## Settings of the run",
            "",
            "```yaml",
            render(_public(run)).rstrip(),
            "```",
            "",
        ]
    )


def _averaged(used: Mapping[int, Sequence[SavedReplica]]) -> str:
    return " Several replicas of a stage were averaged." if any(len(one) > 1 for one in used.values()) else ""


def _how_to_load(has_tokenizer: bool) -> Iterator[str]:
    yield "from transformers import AutoModelForCausalLM" + (", AutoTokenizer" if has_tokenizer else "")
    yield ""
    yield 'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    if has_tokenizer:
        yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")'


def _facts(
    gathered: Gathered, used: Mapping[int, Sequence[SavedReplica]], parameters: int
) -> Iterator[tuple[str, str]]:
    run = gathered.run
    yield "run", f"{run.name} (`{run.run_id}`)"
    yield "parameters", f"{parameters:,}"
    yield "tokens", as_trained(gathered.clock, run.inner.target_tokens)
    yield "text", _plain("; ".join(_text(part, share) for part, share in _shares(run.data)))
    yield "tokenizer", _tokenizer(run.data)
    yield "stages", f"{run.stages}"
    yield "replicas averaged", ", ".join(f"{len(used[stage])} of stage {stage}" for stage in sorted(used))
    yield "made with", f"noloco-node {_plain(gathered.version or __version__)}"


def _worth(gathered: Gathered, score: Score | None) -> Iterator[tuple[str, str]]:
    reported = gathered.reported
    if score is not None:
        worth = f"{score.loss:.4f} nats per token, perplexity {score.perplexity:,.3f}, over {score.tokens:,} tokens"
        yield "held-out loss of this model", worth
        for name, each in score.sources:
            yield f"of which {_plain(name)}", f"{each.loss:.4f} nats per token, over {each.tokens:,} tokens"
    if reported is not None and math.isfinite(reported.loss):
        at = f"at {reported.clock:,.0f} tokens"
        yield "held-out loss, as the swarm reported it", f"{reported.loss:.4f} nats per token {at}"


def _made_of(used: Mapping[int, Sequence[SavedReplica]]) -> Iterator[str]:
    rows = [one for stage in sorted(used) for one in sorted(used[stage], key=lambda each: -each.clock)]
    yield from (f"- stage {one.stage}: {_named(one)}, at {one.clock:,.0f} tokens" for one in rows[:MOST_NODES])
    if len(rows) > MOST_NODES:
        yield f"- and {len(rows) - MOST_NODES:,} more"


def _named(replica: SavedReplica) -> str:
    """A peer; else of the folder, which is nobody else's affair, the last part alone."""
    return f"`{_plain(replica.peer or replica.source.rpartition('/')[2])}`"


def _shares(data: DataSpec) -> Iterator[tuple[DataSpec, str]]:
    for part, windows in zip(data.parts, apportioned(data.weights, PASS_WINDOWS), strict=True):
        yield part, f" ({100.0 * windows / PASS_WINDOWS:.1f} %)" if data.mixture else ""


def _text(data: DataSpec, share: str) -> str:
    if data.source == "stdlib":
        return f"the source files of Python's standard library{share}"
    return ("a text of the owner's" if data.source == "text" else f"{data.path}") + share


def _tokenizer(data: DataSpec) -> str:
    if data.tokenizer == NO_TOKENIZER:
        return "none: it was trained on token ids"
    if data.own_tokenizer:
        return f"the owner's, `{data.tokenizer_fingerprint}`"
    return _plain(data.tokenizer) + ("" if data.tokenizer_revision is None else f", `{data.tokenizer_revision}`")


def _public(run: RunSpec) -> RunSpec:
    """Without where this machine keeps a text, a tokenizer, or weights."""
    run = run.model_copy(update={"model": run.model.model_copy(update={"from_pretrained": None})})
    public: dict[str, object] = {"mixture": tuple(_unplaced(part) for part in run.data.mixture), "prepared": None}
    if run.data.own_tokenizer:
        public["tokenizer"] = OWNERS
    return run.model_copy(update={"data": _unplaced(run.data).model_copy(update=public)})


def _unplaced(source: S) -> S:
    return source.model_copy(update={"path": OWNERS}) if source.source == "text" else source


def _plain(text: str) -> str:
    """One line that marks nothing up."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
