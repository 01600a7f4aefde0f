"""What all groups of settings have in common, and the one text of a value that is hashed and signed."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, le=10**18)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Settings(BaseModel):
    """Base of every group of settings: frozen, and an unknown key is an error rather than a silent default.

    Numbers are finite: the run id could not be made of others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal bytes on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
