"""What a model is worth on a run's held-out text, and what it says: exported, merged, or single replicas beside it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.config.data_spec import NO_TOKENIZER, DataSpec
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.reading import held_out_by_source
from noloco_node.data.samples import Batch, by_source
from noloco_node.data.tokenizers import PretrainedTokenizer, encodable, load_tokenizer
from noloco_node.document_marks import inputs_and_labels, without_marks
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.gathered import SavedReplica
from noloco_node.model.cut import build_config
from noloco_node.model.export import continue_ids, evaluate_model, load_exported, model_of, pretrained_tokenizer
from noloco_node.model.subspace import dense_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model tells a text beforehand."""

    loss: float
    """Nats per token."""
    tokens: int
    text_bytes: int | None
    """None where the run has no tokenizer: what its tokens stand for is not known."""
    sources: tuple[tuple[str, Score], ...] = ()
    """The score of each source of a mixture, by its name."""

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is no number."""
        # Beyond that a perplexity is no number any more.
        return math.exp(self.loss) if self.loss < 700.0 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for a byte of the text, by which tokenizers of different kinds can be compared."""
        if self.text_bytes is None:
            return None
        return self.loss * self.tokens / (self.text_bytes * math.log(2.0))


@dataclass(frozen=True, slots=True)
class _Source:
    """The held-out windows of one source."""

    batches: list[tuple[Tensor, Tensor]]
    tokens: int
    text_bytes: int | None

    @classmethod
    def of(cls, run: RunSpec, windows: Tensor) -> _Source:
        batches, known = list(batches_of(run, windows)), None
        if batches and run.data.tokenizer != NO_TOKENIZER:
            known = max(1, text_bytes(run.data, (without_marks(labels) for _, labels in batches)))
        return cls(batches, sum(labels.numel() for _, labels in batches), known)

    def score(self, model: PreTrainedModel) -> Score:
        return Score(evaluate_model(model, self.batches), self.tokens, self.text_bytes)


class HeldOut:
    """The held-out windows of a run. UserError (DATA) where the text cannot be read."""

    def __init__(self, run: RunSpec) -> None:
        windows, of = held_out_by_source(run.data, build_config(run.model).vocab_size, run.evaluation.windows)
        self._run, self._named = run, of
        self._sources = [_Source.of(run, rows) for rows in by_source(windows, [n for _, n in of])]
        self.rows = windows
        """int32 [n, sequence_length + 1]."""
        self.windows = len(windows)
        self.tokens = sum(source.tokens for source in self._sources)
        self.bytes: int | None = None
        if run.data.tokenizer != NO_TOKENIZER:
            self.bytes = sum(source.text_bytes or 0 for source in self._sources)

    def score(self, model: PreTrainedModel) -> Score:
        """What a model loses on them."""
        scores = [source.score(model) for source in self._sources if source.tokens]
        if not self._named:
            return scores[0]
        names = [name for name, count in self._named if count]
        loss = sum(score.loss * score.tokens for score in scores) / self.tokens
        return Score(loss, self.tokens, self.bytes, tuple(zip(names, scores, strict=True)))

    def score_of(self, state: Mapping[str, Tensor]) -> Score:
        """What the model with these weights loses."""
        return self.score(model_of(self._run.model, state))

    def singles(
        self,
        kept: Mapping[int, Sequence[SavedReplica]],
        mean: Mapping[str, Tensor],
        tell: Callable[[SavedReplica | None, Score], None],
    ) -> None:
        """Tell the score of the mean (None), and of the mean with each single replica in its stage's place."""
        model = model_of(self._run.model, mean)
        tell(None, self.score(model))
        for replicas in kept.values():
            for replica in replicas if len(replicas) > 1 else ():
                part = replica.load()
                self._put(model, part)
                tell(replica, self.score(model))
                self._put(model, {name: mean[name] for name in part})

    def _put(self, model: PreTrainedModel, part: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            model.load_state_dict(dict(dense_state(self._run.model, part)), strict=False)


def batches_of(run: RunSpec, windows: Tensor) -> Iterator[Batch]:
    """Windows, int32 [n, T + 1], in microbatches of (inputs, labels), both int64 [B, T]."""
    size = run.inner.microbatch_windows
    return (inputs_and_labels(windows[start : start + size]) for start in range(0, len(windows), size))


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Tokenizers of SentencePiece's kind name a token for a single byte so."""
_SPACE = "▁"


def text_bytes(spec: DataSpec, batches: Iterable[Tensor]) -> int:
    """Bytes of UTF-8 that these ids (int64, any shape) stand for, of the run's tokenizer. What stands for no text, as
    the end of a document, is none. Raises UserError (DATA) as `load_tokenizer` does."""
    counts: Counter[int] = Counter()
    for batch in batches:
        counts.update(cast("list[int]", batch.flatten().tolist()))  # pyright: ignore[reportUnknownMemberType]
    tokenizer = load_tokenizer(spec)
    if not isinstance(tokenizer, PretrainedTokenizer):
        return counts.total()
    backend: Any = tokenizer.backend
    special, byte_level = set[int](backend.all_special_ids), _is_byte_level(backend)
    tokens = [token for token in counts if token not in special]
    names: list[str] = backend.convert_ids_to_tokens(tokens)
    return sum(counts[token] * _bytes_of(name, byte_level) for token, name in zip(tokens, names, strict=True))


def _is_byte_level(backend: Any) -> bool:
    """Whether each character in a token's name stands for one byte."""
    inner = getattr(backend, "backend_tokenizer", None)
    return inner is not None and "ByteLevel(" in repr(inner.decoder)


def _bytes_of(name: str, byte_level: bool) -> int:
    if byte_level:
        return len(name)
    return 1 if _BYTE.fullmatch(name) else len(name.replace(_SPACE, " ").encode())


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HALF_A_CHARACTER = "\ufffd"
"""A tokenizer shows this for bytes that make no character yet."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a model."""

    prompt: str
    tokens: int
    """So many at most."""
    temperature: float
    """0: always the likeliest."""
    seed: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """What came of it."""

    tokens: int
    full: bool
    """It ends since the model sees no longer text."""
    seconds: float


class Shown:
    """Text that grows by tokens of transformers' `tokenizer`, given on in whole characters."""

    def __init__(self, tokenizer: Any, ids: Sequence[int], write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self.ids = list(ids)
        self._came = len(tokenizer.decode(self.ids))

    def add(self, token: int) -> None:
        """One more token."""
        self.ids.append(token)
        text = self._tokenizer.decode(self.ids)
        if not text.endswith(HALF_A_CHARACTER):
            self._give(text)

    def end(self) -> None:
        """Nothing more comes: also what is no whole character."""
        self._give(self._tokenizer.decode(self.ids))

    def _give(self, text: str) -> None:
        if len(text) > self._came:
            self._write(text[self._came :])
            self._came = len(text)


def open_model(folder: Path) -> PreTrainedModel:
    """The model of a folder, fp32. UserError (RUN_FOLDER) where it cannot be loaded."""
    with _whole(folder):
        return load_exported(folder)


def continued(folder: Path, wish: Wish, write: Callable[[str], None]) -> Spoken:
    """Write the prompt, and what a folder's model says after it, as it comes. Raises UserError: RUN_FOLDER if it cannot
    be loaded or has no tokenizer. It raises USAGE for a prompt without a token, or one that is as long as the model's
    positions."""
    with _whole(folder):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the model in '{folder}' has no tokenizer, so that no text is its beginning",
                "copy the files of the tokenizer that made its token ids into that folder",
            )
        tokenizer, model = pretrained_tokenizer(str(folder)), load_exported(folder)
    ids: list[int] = tokenizer.encode(encodable(wish.prompt), add_special_tokens=False, verbose=False)
    if not ids:
        raise UserError(ExitCode.USAGE, "--prompt is empty", "name the beginning of a text")
    room: int = model.config.max_position_embeddings - len(ids)
    if room < 1:
        message = f"--prompt has {len(ids)} tokens, and the model has {model.config.max_position_embeddings} positions"
        raise UserError(ExitCode.USAGE, message, "name a shorter beginning")
    if max(ids) >= model.config.vocab_size:
        message = f"--prompt has the token {max(ids)}, and the model's vocabulary has {model.config.vocab_size}"
        raise UserError(ExitCode.USAGE, message, "name another beginning: the model has never seen that token")
    began, end, came = ambient.monotonic(), tokenizer.eos_token_id, 0
    write(wish.prompt)
    shown = Shown(tokenizer, ids, write)

    def told(token: int) -> None:
        nonlocal came
        came += 1
        if token != end:
            shown.add(token)

    continue_ids(model, torch.tensor(ids), wish.tokens, wish.seed, wish.temperature, told)
    shown.end()
    return Spoken(came, came == room < wish.tokens, ambient.monotonic() - began)


@contextmanager
def _whole(folder: Path) -> Generator[None]:
    if not (folder / "config.json").is_file():
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{folder}' is no exported model: it has no config.json",
            "name the folder that noloco-node export wrote (--out)",
        )
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model in '{folder}' cannot be used: {lines[0][:300] if lines else type(error).__name__}",
            "copy it again as a whole, or export it anew",
        ) from error
