"""A text that a model continues, token by token: drawn here, and shown as it comes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.bootstrap.spec_fetch import with_own_tokenizer
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.encoding import check_of_text, fitting_tokenizer
from noloco_node.data.tokenizers import NoTokenizer, PretrainedTokenizer, Tokenizer
from noloco_node.directory.records import FIRST_LOOK_SECONDS, look_for_others
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.live import as_onlooker
from noloco_node.model.cut import build_config
from noloco_node.pipeline.live_model import LiveModel
from noloco_node.trust.admission import Access
from noloco_node.trust.screened_directory import ScreenedDirectory

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
    """From the first question to the last answer."""
    replaced: int = 0
    """Peers that were asked for their part and did not give it."""


class Decoder(Protocol):
    """What is needed of a tokenizer, be it of this package or of transformers."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of the ids."""
        ...


class Shown:
    """Text that grows by tokens, given on in whole characters."""

    def __init__(self, tokenizer: Decoder, ids: Sequence[int], write: Callable[[str], None]) -> None:
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


def drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """A token by its logits [vocabulary], as transformers draws it; at temperature 0 the likeliest."""
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / temperature
    if not bool(torch.isfinite(scaled).all()):  # as large as a stranger likes
        scaled = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator))


async def continue_text(
    next_logits: Callable[[Sequence[int]], Awaitable[Tensor]],
    longest: int,
    tokenizer: Tokenizer,
    wish: Wish,
    write: Callable[[str], None],
) -> Spoken:
    """Write the prompt, and what comes after it as it comes; the same seed and weights give the same text. `longest`
    counts the tokens that the model sees. Raises UserError: USAGE for a prompt without a token, or a longer one."""
    ids = _ids_of(wish.prompt, tokenizer)
    if not ids:
        raise UserError(ExitCode.USAGE, "--prompt is empty", "name the beginning of a text")
    if len(ids) > longest:
        message = f"--prompt has {len(ids)} tokens, and the run's windows have {longest}"
        raise UserError(ExitCode.USAGE, message, "name a shorter beginning: the model has never seen a longer text")
    generator = torch.Generator().manual_seed(wish.seed)
    write(wish.prompt if not isinstance(tokenizer, NoTokenizer) else tokenizer.decode(ids))
    shown, last = Shown(tokenizer, ids, write), end_of_text(tokenizer)
    came, began = 0, ambient.monotonic()
    while came < wish.tokens and len(shown.ids) <= longest:
        token = drawn(await next_logits(shown.ids), wish.temperature, generator)
        came += 1
        if token == last:
            break
        shown.add(token)
    shown.end()
    return Spoken(came, came < wish.tokens and len(shown.ids) > longest, ambient.monotonic() - began)


def _ids_of(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Where the run has no tokenizer the prompt names token ids."""
    if not isinstance(tokenizer, NoTokenizer):
        ids = tokenizer.encode(prompt)
        check_of_text(ids, "it makes of --prompt", tokenizer)
        return [int(token) for token in ids]
    words = prompt.split()
    if not all(word.isascii() and word.isdigit() and int(word) < tokenizer.vocab_size for word in words):
        raise UserError(
            ExitCode.USAGE,
            f"--prompt is {prompt[:40]!r}, and the run has no tokenizer: it knows token ids only",
            f"name ids from 0 to {tokenizer.vocab_size - 1} with spaces between; ids is also what comes",
        )
    return [int(word) for word in words]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The token after which a document is over, where the tokenizer has one."""
    backend: Any = tokenizer.backend if isinstance(tokenizer, PretrainedTokenizer) else None
    return None if backend is None else backend.eos_token_id


async def generate_live(
    settings: NodeSettings, own: OwnData, wish: Wish, write: Callable[[str], None], say: Callable[[str], None]
) -> tuple[RunSpec, Spoken]:
    """Continue a text through the stages of the run at `settings.initial_peers`, as an onlooker.

    Raises UserError as `looking_on` and `continue_text` do. It raises CONFIG if the run's tokenizer is a folder, or a
    place of this machine, without `own` word. It raises DATA if the tokenizer cannot be used and NO_STATE_SOURCE if a
    stage gives nothing. A signal raises KeyboardInterrupt.
    """
    async with as_onlooker(settings) as outside:
        spec = with_own_tokenizer(outside.spec, own.tokenizer)
        vocabulary: int = build_config(spec.model).vocab_size
        tokenizer = fitting_tokenizer(spec.data, vocabulary)
        directory = ScreenedDirectory(outside.directory, Access(spec))
        await look_for_others(directory, outside.door.identity.peer_id, FIRST_LOOK_SECONDS)
        model = LiveModel(spec, outside.door.transport, directory, say)
        spoken = continue_text(model.next_logits, model.longest, tokenizer, wish, write)
        came = await outside.supervisor.beside(spoken)
        return spec, replace(came, replaced=model.replaced)
