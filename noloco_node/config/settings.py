"""What all groups of settings have in common, and the one text of a value that is hashed and signed."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

logger = logging.getLogger(__name__)

Positive = Annotated[int, Field(gt=0, le=10**18)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

RENAMED = {
    "lab.spread_points": "lab.divergence_points",
    "node.checkpoint_rounds": "node.checkpoint_outer_steps",
    "node.moves": "node.reassign",
    "run.guard_copies": "run.standby_copies",
    "run.pipeline.put_backs": "run.pipeline.requeues",
    "run.limits.guard_seconds": "run.limits.standby_seconds",
}
"""Names of settings that the release before this one had, and what each is called now."""
GONE = frozenset(
    {
        "node.donor_places",
        "node.exchange_streams",
        "node.generate_share",
        "node.prefetch_bytes",
        "run.inner.muon_momentum",
        "run.outer.clip_multiple",
        "run.outer.fragments",
        "run.outer.gauge_coordinates",
        "run.pipeline.hop_attempts",
    }
)
"""Settings that the release before this one had, and that nothing takes the place of."""


class Settings(BaseModel):
    """Base of every group of settings: frozen, and an unknown key is an error rather than a silent default.

    Numbers are finite: the run id could not be made of others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal bytes on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def new_name(setting: str) -> str:
    """The name of today of a setting, with a warning where it is another one."""
    new = RENAMED.get(setting, setting)
    if new != setting:
        logger.warning("%s is called %s now: rename it, the next release will not know the old name", setting, new)
    return new


def with_new_names(raw: dict[str, Any]) -> None:
    """Give settings that bear the name of an earlier release their new one, with a warning for each. A setting that
    has both keeps the value under its new name."""
    for old, new in RENAMED.items():
        group = _group(raw, old)
        if group is None or old.rpartition(".")[2] not in group:
            continue
        value = group.pop(old.rpartition(".")[2])
        target = _group(raw, new_name(old), make=True)
        if target is not None:
            target.setdefault(new.rpartition(".")[2], value)


def _group(raw: dict[str, Any], setting: str, *, make: bool = False) -> dict[str, Any] | None:
    """The group that holds a setting, by its dotted name; None where there is none."""
    group: object = raw
    for part in setting.split(".")[:-1]:
        if not isinstance(group, dict):
            return None
        named = cast("dict[str, object]", group)
        group = named.setdefault(part, {}) if make else named.get(part)
    return cast("dict[str, Any]", group) if isinstance(group, dict) else None
