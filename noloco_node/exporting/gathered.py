"""What was found of a run's model, wherever it came from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import SHOWN, ExitCode, UserError
from noloco_node.finite import all_finite
from noloco_node.model.stage import Stage, stage_without_weights
from noloco_node.storage.weights import load_slow, read_manifest
from noloco_node.telemetry.words import as_stages
from noloco_node.training.layout import FlatLayout

logger = logging.getLogger(__name__)

NEEDS_FOLDERS = (
    "unless newer weights come, ask volunteers for their run folders, and make the model of those with noloco-node "
    "export"
)


@dataclass(frozen=True, slots=True)
class SavedReplica:
    """The slow weights that one replica of a stage left, to be read when they are wanted."""

    stage: int
    clock: float
    """In swarm tokens."""
    source: str
    """Where they come from, for a person."""
    load: Callable[[], Mapping[str, Tensor]]
    """Full Hugging Face name -> fp32 tensor, on the CPU. Raises UserError where they are damaged."""
    peer: str = ""
    """Its peer id, where that is known."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A held-out loss that the swarm itself has measured."""

    loss: float
    """Nats per token."""
    clock: float
    """Swarm tokens."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A run, and what replicas of each of its stages there are."""

    run: RunSpec
    replicas: Mapping[int, Sequence[SavedReplica]]
    reported: Reported | None
    version: str
    """The version of noloco-node that trained it, as far as that is known."""

    @property
    def clock(self) -> float:
        """How far the furthest replica was trained, swarm tokens."""
        return max((one.clock for these in self.replicas.values() for one in these), default=0.0)

    @property
    def of_different_times(self) -> str:
        """Which stages lag far behind, and what to do about it; empty where none does."""
        clocks = {stage: max(one.clock for one in found) for stage, found in sorted(self.replicas.items())}
        late = far_behind(clocks, self.run.max_lag_tokens)
        if not late:
            return ""
        return f"its stages would be of different times, with {as_stages(late)} far behind; {NEEDS_FOLDERS}"

    def kept(self) -> dict[int, list[SavedReplica]]:
        """The replicas of each stage that are in time, with a warning where stages are of different times. UserError
        (RUN_FOLDER) where a stage has none."""
        lost = [stage for stage in range(self.run.stages) if not self.replicas.get(stage)]
        if lost:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"there are no weights of {as_stages(lost)} of {self.run.stages}, and every stage is needed",
                "name the run folder of a node that served it, too: others that trained with you can send theirs",
            )
        if late := self.of_different_times:
            logger.warning("THE MODEL IS OF NO USE YET: %s", late)
        lag, target = self.run.max_lag_tokens, self.run.inner.target_tokens
        return {stage: in_time(self.replicas[stage], lag, target) for stage in range(self.run.stages)}


class Shapes:
    """What the weights of a run's stages look like. Loads transformers, allocates no weights."""

    def __init__(self, run: RunSpec) -> None:
        self._stages: list[Stage] = [stage_without_weights(run.model, index) for index in range(run.stages)]

    def layout(self, stage: int) -> FlatLayout:
        """Their order in one vector."""
        return FlatLayout.of(dict(self._stages[stage].named_parameters()))

    def unflattened(self, stage: int, flat: Tensor, source: str) -> dict[str, Tensor]:
        """A stage's weights [parameters] under their full Hugging Face names. UserError (RUN_FOLDER) for another
        number of them."""
        layout, names = self.layout(stage), self._stages[stage].full_names()
        if flat.shape != (layout.size,):
            raise _unfit(stage, source, f"they are {flat.numel():,} where {layout.size:,} belong")
        return {names[local]: weight for local, weight in layout.views(flat).items()}

    def check(self, stage: int, state: Mapping[str, Tensor], source: str) -> None:
        """Raise UserError (RUN_FOLDER) where these are not a stage's weights, or no numbers."""
        module = self._stages[stage]
        names = module.full_names()
        expected = {names[local]: parameter.shape for local, parameter in module.named_parameters()}
        if missing := sorted(expected.keys() - state.keys()):
            raise _unfit(stage, source, f"there is no {', '.join(missing[:SHOWN])}")
        if strange := sorted(state.keys() - expected.keys()):
            raise _unfit(stage, source, f"{', '.join(strange[:SHOWN])} is not of this stage")
        for name, value in state.items():
            if value.shape != expected[name]:
                raise _unfit(stage, source, f"{name} is {list(value.shape)} where {list(expected[name])} belongs")
            if not all_finite(value):
                raise _unfit(stage, source, f"{name} holds NaN or infinity")

    def checked(self, replica: SavedReplica) -> SavedReplica:
        """This replica, checked when it is read."""

        def load() -> Mapping[str, Tensor]:
            state = replica.load()
            self.check(replica.stage, state, replica.source)
            return state

        return replace(replica, load=load)


def far_behind(clocks: Mapping[int, float], most: float) -> list[int]:
    """Stages whose weights are more than `most` tokens older than those of the furthest: what is put together of them
    is no model that was ever trained."""
    return [stage for stage, clock in clocks.items() if max(clocks.values()) - clock > most]


def final_weights(folder: Path) -> SavedReplica:
    """What `save_stage` left in a folder. Raises UserError (RUN_FOLDER) where its manifest is damaged."""
    manifest = read_manifest(folder)
    return SavedReplica(manifest.stage, manifest.clock, str(folder), partial(load_slow, folder))


def agreeing(clocks: Sequence[float], within: float, near: float) -> list[int]:
    """The places of the largest set of clocks that lie within so many tokens of each other. If several sets are as
    large, it is the one whose lowest clock is nearest to `near`. A clock is its owner's word: the largest one decides
    nothing."""
    order = sorted(range(len(clocks)), key=lambda place: clocks[place])
    sets = [[p for p in order[start:] if clocks[p] - clocks[first] <= within] for start, first in enumerate(order)]
    return sorted(min(sets, key=lambda found: (-len(found), abs(clocks[found[0]] - near)))) if sets else []


def in_time(replicas: Sequence[SavedReplica], max_lag: float, target: float) -> list[SavedReplica]:
    """The replicas of a stage that are at most `max_lag` tokens behind the furthest, as stage peers average. One that
    left early, or came when the others had gone, would pull the model back. A clock beyond the run's `target` counts as
    the target."""
    furthest = min(target, max(replica.clock for replica in replicas))
    kept = [replica for replica in replicas if furthest - replica.clock <= max_lag]
    if len(kept) < len(replicas):
        logger.warning(
            "%d of %d replicas of stage %d are more than %s tokens behind the others, and no part of the model",
            len(replicas) - len(kept),
            len(replicas),
            replicas[0].stage,
            f"{max_lag:,.0f}",
        )
    return kept


def _unfit(stage: int, source: str, why: str) -> UserError:
    return UserError(
        ExitCode.RUN_FOLDER,
        f"the weights of {source} do not fit stage {stage} of the run: {why}",
        "leave that replica out; it was saved for another model, or by another version of noloco-node",
    )
