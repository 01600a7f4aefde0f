"""What a configuration comes to, and whether its parts fit each other: everything that can be known before training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import Config
from noloco_node.config.run_spec import RunSpec, check_microbatch_bytes
from noloco_node.errors import ExitCode, UserError

MANY_PASSES = 16
"""From so many passes over a text on, one more brings a model next to nothing (arXiv 2305.16264)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run in numbers, for one replica of each stage where nothing else is said."""

    stage_parameters: tuple[int, ...]
    """Parameters of each stage."""
    layers: tuple[int, ...]
    """Layers of each stage."""
    inner_steps: int
    """Inner steps that each replica takes."""
    outer_rounds: int
    """Outer steps that each replica takes, the last one included."""
    outer_bytes: tuple[int, ...]
    """The bytes that a replica of each stage sends in an outer step; it receives as many."""
    microbatch_bytes: tuple[float, ...]
    """Bytes that a replica of each stage sends for a microbatch: on to the next stage and back to the one before."""
    cut_width: int
    """Numbers of a token that travel between two stages."""
    hidden: int
    """Numbers of a token in the residual stream."""
    warnings: tuple[str, ...]
    """What is allowed but seldom meant."""
    weights: tuple[str, ...] = ()
    """What the weights to start from are, and what of them is not as their folder has it; nothing for a seed."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.stage_parameters)


def plan(config: Config) -> Plan:
    """`plan_run`, with what is seldom meant in this configuration. Raises UserError also as `check_lines` does."""
    from noloco_node.sizing.footprint import footprint_of
    from noloco_node.sizing.traffic import check_lines, line_needs

    numbers = plan_run(config.run)
    if (config.node.uplink_mbit, config.node.downlink_mbit) != (None, None):
        check_lines(config.run, config.node, line_needs(config.run, footprint_of(config.run)))
    return replace(numbers, warnings=tuple(_warnings(config, numbers.inner_steps)))


def plan_run(run: RunSpec) -> Plan:
    """Check the run across rooms (model against stages) and count what it comes to.

    It loads transformers, but allocates no weights. Raises UserError (CONFIG) as `model.cut.cut_model` does. It does so
    too if a microbatch is too large to travel, or a window is longer than the model's positions. It raises DATA if the
    weights to start from are not there, or not the model's.
    """
    from noloco_node.model.cut import build_config, check_cut, check_parts_documents, cut_width
    from noloco_node.model.pretrained import pretrained_lines
    from noloco_node.sizing.footprint import footprint_of
    from noloco_node.sizing.traffic import traffic_of

    config = build_config(run.model)
    check_cut(run.model)
    if run.data.attention == "document":
        check_parts_documents(run.model)
    _check_positions(run, getattr(config, "max_position_embeddings", None))
    check_microbatch_bytes(run, cut_width(run.model, config))
    footprint = footprint_of(run)
    parameters = footprint.parameters
    inner_steps = -(-run.inner.target_tokens // run.inner.global_batch_tokens)
    traffic = traffic_of(run, footprint)
    return Plan(
        stage_parameters=parameters,
        layers=footprint.layers,
        inner_steps=inner_steps,
        outer_rounds=inner_steps // run.outer.inner_steps + 1,
        outer_bytes=tuple(each.outer_step for each in traffic),
        microbatch_bytes=tuple(each.microbatch for each in traffic),
        cut_width=footprint.cut_width,
        hidden=int(config.hidden_size),
        warnings=(),
        weights=tuple(pretrained_lines(run.model)),
    )


def check_text(run: RunSpec) -> None:
    """Raise UserError (DATA) where tokenizer or text cannot be trained on, as far as that shows without reading the
    text. Loads the tokenizer."""
    from noloco_node.data.encoding import check_made_tokens, fitting_tokenizer
    from noloco_node.data.prepared import check_text_here
    from noloco_node.model.cut import build_config

    check_text_here(run.data)
    check_made_tokens(run.data, fitting_tokenizer(run.data, build_config(run.model).vocab_size))


def note_on_blocks(config: Config) -> str | None:
    """A note on a streamed text on this machine that has fewer blocks than the first stage has replicas, else None. In
    a mixture it is on the first such source."""
    from noloco_node.data.shards import shard_files

    data, replicas = config.run.data, config.local_swarm.replicas
    for number, part in enumerate(data.parts):
        if not data.streaming or part.source != "text":
            continue
        shards = len(shard_files(part))
        if shards * data.parts_per_shard < replicas:
            what = f"run.data.mixture[{number}]" if data.mixture else "the text"
            return (
                f"{what} has {shards} shards and {shards * data.parts_per_shard} blocks, fewer than the first stage "
                f"has replicas ({replicas}): some would read the same at a time; set run.data.parts_per_shard to "
                f"{-(-4 * replicas // shards)} or more"
            )
    return None


def note_on_passes(run: RunSpec, tokens: int | None) -> str | None:
    """A note on a text of so many tokens to train on that the run would read far too often; None where it is none."""
    if not tokens or run.inner.target_tokens <= MANY_PASSES * tokens:
        return None
    return (
        f"run.inner.target_tokens is {run.inner.target_tokens / tokens:.0f} times the text of {tokens:,} tokens: a "
        "model that reads it so often learns it by heart, and the validation loss rises; train on more text or for "
        "fewer tokens"
    )


def most_tokens(data: DataSpec) -> int | None:
    """The most tokens that a text has which lies here and is not streamed, as a token is a byte at least; None where
    its files do not tell."""
    from noloco_node.data.formats import Format
    from noloco_node.data.prepared import read_manifest
    from noloco_node.data.shards import shard_files

    if data.streaming or any(part.source != "text" and part.prepared is None for part in data.parts):
        return None
    if data.prepared is not None:
        return sum(read_manifest(part).training for part in data.parts)
    files = [file for part in data.parts for file in shard_files(part)]
    plain = all(file.format in (Format.TEXT, Format.JSON, Format.CSV) and not file.packing for file in files)
    return sum(file.size for file in files) if plain else None


def _check_positions(run: RunSpec, positions: int | None) -> None:
    if positions is not None and positions < run.data.sequence_length:
        raise UserError(
            ExitCode.CONFIG,
            f"run.model.config.max_position_embeddings is {positions}, less than run.data.sequence_length "
            f"({run.data.sequence_length}): the model would not take the windows that it is to train on",
            f"set run.model.config.max_position_embeddings to {run.data.sequence_length} or more",
        )


def plan_lines(run: RunSpec, numbers: Plan) -> list[str]:
    """The run and its numbers for a person, one thing a line."""
    each = " + ".join(f"{count:,}" for count in numbers.stage_parameters)
    sizes = " / ".join(f"{count / 1e6:,.2f}" for count in numbers.outer_bytes)
    sent = " / ".join(f"{count / 1e6:,.2f}" for count in numbers.microbatch_bytes)
    wire = (
        [] if run.stages == 1 else [f"  microbatch        {sent} MB sent per replica ({run.pipeline.activations[-1]})"]
    )
    return [
        f"run {run.name} ({run.run_id})",
        f"  parameters        {numbers.parameters:,} ({each})",
        f"  stages            {run.stages}, with {' + '.join(map(str, numbers.layers))} layers",
        f"  tokens            {run.inner.target_tokens:,}, {run.inner.global_batch_tokens:,} an inner step",
        *wire,
        *_subspace_line(run, numbers),
        f"  inner steps       {numbers.inner_steps:,} per replica",
        f"  outer steps       about {numbers.outer_rounds:,} per replica, one in {run.outer.inner_steps} inner steps",
        f"  outer step        {sizes} MB sent per replica ({run.outer.codec}), as many received",
        *(f"  {'' if index else 'first weights':<17} {line}" for index, line in enumerate(numbers.weights)),
    ]


def _subspace_line(run: RunSpec, numbers: Plan) -> list[str]:
    """What crosses a cut in a subspace, and what is free of it."""
    if run.model.subspace_rank is None:
        return []
    layers, free = sum(numbers.layers), run.model.subspace_last_stage_free
    bound = layers - (numbers.layers[-1] if free else 0)
    which = f"{bound} of {layers} layers write into it"
    if free and 2 * bound > layers:
        which += ", and fewer cost less loss (run.model.layers_per_stage)"
    return [f"  subspace          {numbers.cut_width:,} of {numbers.hidden:,} numbers a token travel; {which}"]


def _warnings(config: Config, inner_steps: int) -> list[str]:
    run = config.run
    lines: list[str] = []
    if config.local_swarm.replicas < 4:
        lines.append(
            f"local_swarm.replicas is {config.local_swarm.replicas}: "
            "with fewer than 4 NoLoCo cannot be told from DiLoCo"
        )
    if inner_steps <= run.outer.inner_steps:
        lines.append(
            f"run.outer.inner_steps ({run.outer.inner_steps}) is not below the run's {inner_steps} inner steps: "
            "replicas would average only at the end"
        )
    if run.model.subspace_rank is not None and run.model.embedding_std is None:
        lines.append(
            "run.model.embedding_std is not set: the fixed part of an embedding in a subspace keeps the architecture's "
            "size, 0.02 for most, with which training is slow; 0.3 is a good one"
        )
    if run.standby_copies and run.stages == 1:
        lines.append(
            f"run.standby_copies is {run.standby_copies}, and does nothing with one stage: nodes of other stages keep "
            "the copies; here each replica of the stage holds all of it"
        )
    if run.outer.beta > 1.5 * (1.0 - run.outer.alpha) + 1e-9:
        lines.append(
            f"run.outer.beta / (1 - run.outer.alpha) is {run.outer.beta / (1 - run.outer.alpha):.2f}: above 1.5 the "
            "outer step overshoots, which costs loss"
        )
    if run.model.fingerprint is not None and run.data.tokenizer == "bytes" and run.model.config["vocab_size"] != 256:
        lines.append(
            "run.data.tokenizer is bytes, which the weights of run.model.from_pretrained were hardly trained with: set "
            "it to the model's own, the same folder or name where it holds a tokenizer"
        )
    if "num_experts_per_tok" in run.model.config and not run.model.config.get("output_router_logits"):
        lines.append(
            "run.model.config.output_router_logits is not true: the routers' own loss, which spreads tokens over the "
            "experts, is not trained, as it is not by transformers then"
        )
    share = run.inner.global_batch_tokens / config.local_swarm.replicas
    if share < run.microbatch_tokens:
        lines.append(
            f"one microbatch ({run.microbatch_tokens} tokens) is more than a replica's share of "
            f"run.inner.global_batch_tokens ({share:.0f} with {config.local_swarm.replicas} replicas): "
            "the effective batch is larger than it says"
        )
    return lines
