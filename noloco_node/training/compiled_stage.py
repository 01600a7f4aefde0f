"""The forward of a stage as torch.compile makes it (`node.compile`), for microbatches of one shape.

All else goes by the plain form: a shape that a stranger chooses has nothing compiled here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.func import functional_call  # pyright: ignore[reportPrivateImportUsage, reportUnknownVariableType]

from noloco_node.config.node_settings import UNCOMPILED, why_not_compiled
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.stage import Stage

T = TypeVar("T")

CompileBackend = str | Callable[..., Any]
"""A backend of torch.compile: a name, or a function that turns a graph into something that can be called."""
INDUCTOR = "inductor"
"""torch's own backend, which needs a C++ compiler."""


class CompiledStage:
    """One stage, compiled at its first calls. A process has one at a time: what was compiled before is forgotten."""

    def __init__(self, stage: Stage, shape: tuple[int, int], backend: CompileBackend) -> None:
        def forward(weights: dict[str, Tensor], inputs: Tensor, positions: Tensor | None, ids: Tensor | None) -> Tensor:
            return cast(Tensor, functional_call(stage, weights, (inputs, positions, ids)))

        torch.compiler.reset()  # else the stages that a node has left would fill torch's list of forms
        self._shape = shape
        self._forward = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)  # pyright: ignore[reportUnknownMemberType]

    def takes(self, inputs: Tensor) -> bool:
        """Whether these inputs, [B, T] or [B, T, hidden], have the shape that it is made for."""
        return inputs.shape[:2] == self._shape

    def __call__(
        self, weights: dict[str, Tensor], inputs: Tensor, positions: Tensor | None, ids: Tensor | None
    ) -> Tensor:
        """Outputs of the stage with these weights, for inputs that it takes."""
        at, of = (None if each is None else each.contiguous() for each in (positions, ids))
        return self._forward(weights, inputs.contiguous(), at, of)


def check_compiles(stage: Stage, backward: str) -> None:
    """Raise UserError (CONFIG) where torch.compile cannot follow, as `why_not_compiled` says."""
    reason = why_not_compiled(backward, routers=stage.router is not None)
    if reason is not None:
        raise UserError(ExitCode.CONFIG, reason, UNCOMPILED)


def trying(work: Callable[[], T]) -> T:
    """What `work` gives. Raises UserError (CONFIG) in place of what torch.compile raises."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's own errors of compiling are such, by way of several private classes
        reason = " ".join(str(error).split("\n")[:2]).strip() or repr(error)  # who raised it, and what that says
        raise UserError(
            ExitCode.CONFIG,
            f"node.compile is true, but torch.compile fails here: {reason}",
            f"install a C++ compiler (g++) where none was found, or {UNCOMPILED}",
        ) from error
