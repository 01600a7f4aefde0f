"""The model of a run: one group of what every peer must agree on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from noloco_node.config.settings import Positive, Settings

MAX_PARTS = 1024
"""A model has at most so many layers, heads or experts; the largest that are known have a few hundred."""


class ModelSpec(Settings):
    """The model, as arguments of `transformers.AutoConfig.for_model`, and its first weights. They are drawn from a
    seed, or are those of a model that is there already."""

    config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Must hold `model_type`; everything else goes to that architecture's config class. What is not set here is that of
    `from_pretrained`, where there is one."""
    from_pretrained: Annotated[str, Field(min_length=1)] | None = None
    """Weights to start from: OWNER/NAME of the Hugging Face hub, or a folder of this machine with config.json and
    safetensors. A relative path counts from where the command is started. Each stage reads its own tensors. The place
    of a volunteer's copy is no part of the run."""
    fingerprint: Annotated[str, Field(pattern=r"^weights-[0-9a-f]{32}$")] | None = None
    """What those weights are; taken from `from_pretrained` if it is not set. A node that has or takes a stage peer's
    state needs no files. A node that must begin from the first weights is refused with others."""
    seed: int = 0
    """Seed of the first weights: each module is initialised from (seed, its full name)."""
    embedding_std: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """Standard deviation of the first embedding; not set leaves it to the architecture's rule, which is 0.02 for most.
    A small model learns faster from a larger one. In a subspace it is the size of the fixed part, which stays."""
    stages: Annotated[int, Field(gt=0, le=256)] = 1
    """Into how many pipeline stages the layers are cut."""
    layers_per_stage: tuple[Positive, ...] | None = None
    """How many layers each stage has, by hand; not set makes the most expensive stage as cheap as can be."""
    subspace_rank: Annotated[int, Field(ge=8, le=65536, multiple_of=8)] | None = None
    """So many numbers a token travel between stages, in place of hidden_size of them. Attention and feed-forward parts
    then write into a subspace that `seed` draws, and fewer weights are trained. The export is an ordinary model. Every
    stage reads the text. Not set: the model is as its architecture has it."""
    subspace_last_stage_free: bool = False
    """Whether the last stage's layers write anywhere, since nothing is sent behind them. It costs no bytes, and the
    more a model has there, the less the subspace costs in loss."""

    @model_validator(mode="after")
    def _is_named(self) -> ModelSpec:
        if not self.config:
            raise ValueError(
                "run.model.config is not set: give it with its model_type, or name weights to start from, with their "
                "own config, as run.model.from_pretrained"
            )
        if self.from_pretrained is not None and self.fingerprint is None:
            raise ValueError("run.model.from_pretrained is set without the fingerprint of its weights")
        if self.fingerprint is not None and self.embedding_std is not None and self.subspace_rank is None:
            raise ValueError(
                "run.model.embedding_std is set, but the run begins with weights that are there already: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _frees_of_something(self) -> ModelSpec:
        if self.subspace_last_stage_free and self.subspace_rank is None:
            raise ValueError(
                "run.model.subspace_last_stage_free is true, but there is no subspace: set run.model.subspace_rank, or "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_be_laid_out(self) -> ModelSpec:
        for name, value in self.config.items():
            counts = name.startswith(("num_", "n_")) or "layers" in name
            if counts and isinstance(value, int | float) and value > MAX_PARTS:
                raise ValueError(
                    f"run.model.config.{name} is {str(value)[:20]}: to lay out so many would take this machine minutes "
                    f"or hours; set it to {MAX_PARTS} or less"
                )
        return self

    @model_validator(mode="after")
    def _layers_by_hand(self) -> ModelSpec:
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.stages:
            raise ValueError(
                f"run.model.layers_per_stage names {len(self.layers_per_stage)} stages, and run.model.stages is "
                f"{self.stages}: give one number for each stage"
            )
        return self
