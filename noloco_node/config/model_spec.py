"""The model of a run: one group of what every peer must agree on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from noloco_node.config.settings import Settings

MAX_PARTS = 1024
"""Most layers, heads or experts that a model may have; the largest that are known have a few hundred."""


class ModelSpec(Settings):
    """The model, as arguments of `transformers.AutoConfig.for_model`, and the seed of its first weights."""

    config: dict[str, JsonValue]
    """Must hold `model_type`; everything else goes to that architecture's config class."""
    seed: int = 0
    """Seed of the first weights: each module is initialised from (seed, its full name)."""
    stages: Annotated[int, Field(gt=0, le=256)] = 1
    """Into how many pipeline stages the layers are cut."""

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
