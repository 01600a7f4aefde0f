"""What the nodes of a simulation learn: noisy quadratics of 64 dimensions that cost next to nothing, on numbered
windows of made-up text.

The outer step is the node's own. Nothing here is summed by a library. Products and differences of single numbers are
the same everywhere, and sums are `math.fsum`, which is exact whatever the order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean

import torch
from torch import Tensor

from noloco_node.config.run_spec import ACTIVATION_CODECS, RunSpec, token_bytes
from noloco_node.data.samples import Samples
from noloco_node.model.cut import StageCut
from noloco_node.model.router import Router
from noloco_node.outer import CodecName
from noloco_node.outer.codec import CODECS
from noloco_node.pipeline.activations import DTYPES, wire_length
from noloco_node.sizing.footprint import Footprint
from noloco_node.training.compute_thread import Compute, Priority
from noloco_node.training.frozen_state import Vectors
from noloco_node.training.inner_optimizer import MOMENTS
from noloco_node.training.layout import FlatLayout
from noloco_node.training.placing import PlacedStage, outer_of
from noloco_node.training.trainer import ForwardContext, LossResult, StepResult, Trainer, carried_dtype
from noloco_node.transport.memory import Parcel
from noloco_node.transport.messages import DTYPE_NAMES, TensorSpec

NODE_WINDOWS = 1 << 20
"""The windows of one node and of the next are so many numbers apart."""
HELD_OUT = NODE_WINDOWS**2
"""The number of the first held-out window: beyond all that is trained on."""


def made_up(numbers: Sequence[int], vocabulary: int, length: int) -> Tensor:
    """Rows of token ids, int32 [b, length + 1], each a function of its number: ids that count up by a stride."""
    rows: list[Tensor] = []
    for number in numbers:
        mixed = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)
        start, stride = mixed % vocabulary, 1 + (mixed >> 32) % 5
        rows.append((start + stride * torch.arange(length + 1)) % vocabulary)
    return torch.stack(rows).to(torch.int32)


DIMENSIONS = 64
HIDDEN = 1
"""The count of numbers that stand for a token's activations."""
VOCABULARY = 256
"""There are as many noises of microbatches; the inputs of a microbatch say which one it has."""
BEST_LOSS = 2.0
"""Nats per token at the optimum; a stage adds half of its squared distance to it, a dimension."""


@dataclass(frozen=True)
class QuadraticFacts:
    """Implements `StageFacts`."""

    cut: StageCut
    cut_width: int = HIDDEN
    vocab_size: int = VOCABULARY
    router: Router | None = None

    def full_names(self) -> dict[str, str]:
        """See `StageFacts`."""
        return {"weights": f"stage.{self.cut.index}.weights"}


@dataclass(frozen=True)
class Landscape:
    """What one stage learns: where it begins, where the optimum lies, and how noisy a microbatch is."""

    begin: Tensor
    optimum: Tensor
    noises: tuple[Tensor, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, seed: int, stage: int, noise: float) -> Landscape:
        """The landscape of all replicas of a stage. The swarms of a hunt share it: nobody changes it."""
        rng = random.Random(f"landscape/{seed}/{stage}")

        def row(size: float) -> Tensor:
            return torch.tensor([rng.gauss(0.0, size) for _ in range(DIMENSIONS)])

        return cls(row(1.0), row(1.0), tuple(row(noise) for _ in range(VOCABULARY)))

    @cached_property
    def goal(self) -> list[float]:
        """The optimum as numbers."""
        return _numbers(self.optimum)


class QuadraticTrainer(Trainer):
    """A `Trainer` whose gradient at θ is θ − θ* and the microbatch's noise; inner steps are plain descent."""

    _loss: float | None = None
    """The loss of the present weights; None until somebody asks."""

    def __init__(
        self, facts: QuadraticFacts, land: Landscape, wire_dtype: torch.dtype, squares_share: float = 1.0
    ) -> None:
        """`squares_share`: of the weights for which the optimizer in its place would keep a mean square."""
        master = land.begin.clone()
        super().__init__(facts, FlatLayout.of({"weights": master.view(8, -1)}), master, published=torch.float32)
        self._first = facts.cut.is_first
        self._wire_dtype = wire_dtype
        self._land = land
        self._squares = round(squares_share * self.layout.size)

    def forward(self, inputs: Tensor, passage: ForwardContext) -> Tensor:
        """See `Trainer`: the first token of each row goes on, as a stand-in for the activations."""
        passage.version = self.versions.acquire()
        passage.inputs = inputs
        return self._stand_in(inputs)

    def backward(
        self,
        passage: ForwardContext,
        output_gradient: Tensor,
        loss_sum: float,
        tokens: int,
        *,
        source: str = "",
        scale: float | None = None,
        chosen: Sequence[int] = (),
    ) -> Tensor | None:
        """See `Trainer`."""
        del source, scale, chosen
        assert passage.version is not None, "backward needs a forward"
        assert passage.inputs is not None
        passage.signs = self._gather(passage.version.flat, passage.inputs, loss_sum, tokens).sign().to(torch.int8)
        self.discard(passage)
        return None if self._first else output_gradient

    def loss(
        self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None, *, source: str = "", chosen: Sequence[int] = ()
    ) -> LossResult:
        """See `Trainer`."""
        del ids, source, chosen
        tokens = labels.numel()
        loss_sum = self._present_loss() * tokens
        self._gather(self.versions.current.flat, inputs, loss_sum, tokens)
        return LossResult(loss_sum, tokens, None if self._first else torch.ones_like(inputs))

    def evaluate(self, inputs: Tensor, positions: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """See `Trainer`."""
        del positions, ids
        return self._stand_in(inputs)

    def evaluate_loss(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> float:
        """See `Trainer`."""
        del inputs, ids
        return self._present_loss() * labels.numel()

    def step(self, learning_rate: float) -> StepResult:
        """See `Trainer`; nothing is clipped."""
        tokens, loss = self.tokens_accumulated, self.loss_accumulated / self.tokens_accumulated
        mean = self.gradient.div_(tokens)
        norm = math.sqrt(math.fsum(number * number for number in _numbers(mean)))
        self.master.sub_(mean.mul(learning_rate))
        self._publish()
        self.clear_gradient()
        return StepResult(tokens, loss, norm, skipped=False)

    @property
    def moment_sizes(self) -> dict[str, int]:
        """See `Trainer`: plain descent has none, and what a real one has takes its bytes."""
        return dict(zip(MOMENTS, (self.layout.size, self._squares), strict=True))

    def optimizer_vectors(self) -> Vectors:
        """See `Trainer`: zeros."""
        moments = {name: torch.zeros(size) for name, size in self.moment_sizes.items()}
        return {name: [(0, vector)] for name, vector in {**moments, "optimizer_steps": torch.tensor(0)}.items()}

    def _stand_in(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 2:
            return inputs[..., None].to(self._wire_dtype)
        return inputs

    def _gather(self, weights: Tensor, inputs: Tensor, loss_sum: float, tokens: int) -> Tensor:
        """What it adds to the gradient."""
        first = inputs[0].flatten()[:4]
        noise = self._land.noises[int(math.fsum(_numbers(first)) * 31 + float(first[-1])) % VOCABULARY]
        added = weights.sub(self._land.optimum).add_(noise).mul_(tokens)
        self.gradient.add_(added)
        self._count(loss_sum, tokens)
        return added

    def _present_loss(self) -> float:
        if self._loss is None:
            away = zip(_numbers(self.master), self._land.goal, strict=True)
            self._loss = BEST_LOSS + math.fsum((own - best) ** 2 for own, best in away) / 2 / len(self._land.goal)
        return self._loss

    def _publish(self) -> None:
        self._loss = None
        super()._publish()


EXCHANGES = "outer"
"""Family of the methods whose tensors are weights as the run's codec writes them."""
WEIGHTS = ("state", "backup", "copy", "slow")
"""Families of methods whose tensors are weights as they are."""


class Quadratic:
    """What stands on nodes' devices, and what stage 0 reads. `noise` is the standard deviation of a microbatch's
    gradient in each dimension, `squares_share` as `QuadraticTrainer` takes it."""

    def __init__(self, seed: int = 0, noise: float = 1.0, squares_share: float = 1.0) -> None:
        self._seed = seed
        self._noise = noise
        self._squares_share = squares_share

    async def place(self, spec: RunSpec, stage: int, thread: Compute) -> PlacedStage:
        """A stage with its first weights."""
        land = Landscape.of(self._seed, stage, self._noise)
        facts = QuadraticFacts(StageCut(stage, spec.stages, stage, stage + 1))

        def work() -> PlacedStage:
            wire_dtype = carried_dtype(spec.pipeline.activations)
            trainer = QuadraticTrainer(facts, land, wire_dtype, self._squares_share)
            return PlacedStage(facts, trainer, outer_of(spec, trainer))

        return await thread.run(Priority.STEP, work)

    def weights(self, footprint: Footprint) -> tuple[int, ...]:
        """How many stand on the device at each stage, where the run's own model has that `footprint`."""
        return (DIMENSIONS,) * len(footprint.parameters)

    def samples(self, spec: RunSpec, number: int, drawn: int) -> Samples:
        """The text of the node with this number, of which it drew so many microbatches before: windows that count up
        from where its own begin, made up from their numbers."""
        size, length = spec.inner.microbatch_windows, spec.data.sequence_length
        begin, count = number * NODE_WINDOWS, drawn

        async def draw() -> Tensor:
            nonlocal count
            first = begin + count * size
            count += 1
            return made_up(range(first, first + size), VOCABULARY, length)

        held_out = made_up(range(HELD_OUT, HELD_OUT + spec.evaluation.windows), VOCABULARY, length)
        return Samples(draw=draw, held_out=held_out)


def weigh_as(footprint: Footprint, codec: CodecName) -> Callable[[Parcel], float]:
    """What a parcel stands for, with this model in place of the quadratic.

    Each activation is that of a token of this model, each weight of a stage its share of the model's. What crosses in
    an exchange is what the codec makes of such a stage. Codes of either kind come in blocks with scales of their own,
    which the few numbers here do not fill.
    """
    weights = fmean(footprint.parameters)
    wire = CODECS[codec].wire_bytes
    exchanged = wire(round(weights)) / wire(DIMENSIONS)
    tokens = {
        (DTYPE_NAMES[DTYPES[name]], wire_length(HIDDEN, name)): (
            token_bytes(footprint.cut_width, name) / token_bytes(HIDDEN, name)
        )
        for name in ACTIVATION_CODECS
    }

    def times(parcel: Parcel, spec: TensorSpec) -> float:
        if len(spec.shape) == 3:
            return tokens[spec.dtype, spec.shape[-1]]
        if parcel.method.startswith(EXCHANGES):
            return exchanged
        return weights / DIMENSIONS if parcel.method.startswith(WEIGHTS) else 1.0

    def weigh(parcel: Parcel) -> float:
        return parcel.header_octets + sum(spec.nbytes * times(parcel, spec) for spec in parcel.specs)

    return weigh


def _numbers(vector: Tensor) -> list[float]:
    return vector.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
