"""A tokenizer of one's own: byte-level BPE, learnt from the documents that a run trains on."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.documents import Document, data_error
from noloco_node.data.loaders import PIECE_LENGTH
from noloco_node.data.mixture import naming_part
from noloco_node.data.sources import divided
from noloco_node.data.tokenizers import encodable
from noloco_node.errors import ExitCode, UserError

END = "<|endoftext|>"
"""This token stands after each document; it is the only one that is no text."""
SMALLEST = 257
"""The smallest vocabulary in tokens: one for each byte, and the end of a text."""
LARGEST = 1 << 20
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""No token reaches over the end of one of these pieces. They are a word with the space before it, up to three digits,
signs, ends of lines, and space. Every character belongs to one. The tokenizers of Llama 3 and Qwen take the same
pattern."""
LONGEST_TOKEN = 128
"""A token has at most so many bytes: a text without spaces, or one that repeats itself, gives tokens as long as
itself."""

_Told = Callable[[int, int, bool], None]
"""A function that hears how many documents and bytes were read, and whether that was all."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a tokenizer was learnt from, and what came of it."""

    tokens: int
    """All ids are below this."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of these documents."""
    bytes_per_token: float | None
    """Bytes a token of documents that it did not learn from; None if there was none."""


class TextTaken:
    """The documents that a tokenizer learns from, and a few that are held out to try it on."""

    def __init__(self, spec: DataSpec, most_bytes: int, told: _Told = lambda _documents, _bytes, _read: None) -> None:
        self._spec, self._most_bytes, self._told = spec, most_bytes, told
        self.documents = 0
        self.text_bytes = 0
        self.tried: list[str] = []
        self._tried_bytes = 0

    def __iter__(self) -> Iterator[str]:
        """Pieces of text. Raises UserError (DATA) as reading does, and for token ids that others made."""
        for document, held_out in _by_weight(self._spec):
            text = encodable(document.text)
            if held_out:
                if self._tried_bytes < PIECE_LENGTH:
                    self.tried.append(text[:PIECE_LENGTH])
                    self._tried_bytes += len(self.tried[-1].encode())
                continue
            self.documents += 1
            for start in range(0, len(text), PIECE_LENGTH):
                piece = text[start : start + PIECE_LENGTH]
                yield piece
                self.text_bytes += len(piece.encode())
                self._told(self.documents, self.text_bytes, False)
                if self.text_bytes >= self._most_bytes:
                    break
            if self.text_bytes >= self._most_bytes:
                break
        self._told(self.documents, self.text_bytes, True)


def _by_weight(spec: DataSpec) -> Iterator[tuple[Document, bool]]:
    """`divided` of each source of a mixture, next of that which is furthest behind its weight, as far as it goes.
    Raises UserError (DATA) as that does, and for token ids that others made."""

    def of_part(number: int, part: DataSpec) -> Iterator[tuple[Document, bool]]:
        with naming_part(spec, number):
            for document, held_out in divided(part):
                if document.ids is not None:
                    raise data_error(
                        f"run.data.text_field '{part.text_field}' holds token ids, not text: they have a tokenizer",
                        "set run.data.text_field to a column of text",
                    )
                yield document, held_out

    readers = {number: of_part(number, part) for number, part in enumerate(spec.parts)}
    taken = dict.fromkeys(readers, 0.0)
    while readers:
        number = min(readers, key=taken.__getitem__)
        found = next(readers[number], None)
        if found is None:
            del readers[number]
            continue
        taken[number] += len(found[0]) / spec.weights[number]
        yield found


def train_tokenizer(
    spec: DataSpec,
    folder: Path,
    vocab_size: int,
    *,
    most_bytes: int,
    told: _Told = lambda _documents, _bytes, _read: None,
) -> Learnt:
    """Learn a tokenizer from the first documents of the run's text that are not held out, and write it to `folder`.

    It has at most `vocab_size` tokens, learnt from at most `most_bytes`, and is written for `AutoTokenizer`. `told` is
    called on another thread.

    Raises UserError: USAGE for a size out of bounds, RUN_FOLDER if the folder exists or cannot be made. It raises DATA
    as `divided` does and if there is no text. Nothing is left under that name if it does not come to its end.
    """
    if not SMALLEST <= vocab_size <= LARGEST:
        raise UserError(
            ExitCode.USAGE,
            f"--vocab-size is {vocab_size}",
            f"name a number from {SMALLEST} (the bytes and the end of a text) to {LARGEST}",
        )
    with _whole(folder) as beside:
        taken = TextTaken(spec, most_bytes, told)
        thread = ThreadPoolExecutor(1)  # the library does not hear Ctrl-C while it counts
        try:
            fast = thread.submit(_learn, taken, vocab_size).result()
        finally:
            thread.shutdown(wait=False)
        fast.save_pretrained(beside)
        size: int = len(fast)
        tried = sum(len(text.encode()) for text in taken.tried)
        ids = sum(len(fast.encode(text, add_special_tokens=False, verbose=False)) for text in taken.tried)
    return Learnt(size, taken.documents, taken.text_bytes, tried / ids if ids else None)


def _learn(text: TextTaken, vocab_size: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made: Any = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
        max_token_length=LONGEST_TOKEN,
    )
    made.train_from_iterator(iter(text), trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, clean_up_tokenization_spaces=False, model_input_names=["input_ids"]
    )


@contextlib.contextmanager
def _whole(folder: Path) -> Generator[Path]:
    """A folder beside the wanted one, which takes its name in the end. Raises UserError (RUN_FOLDER)."""
    if folder.exists() or folder.is_symlink():
        raise UserError(
            ExitCode.RUN_FOLDER, f"--out is '{folder}', which exists already", "name a folder that does not"
        )
    try:
        parent = folder.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}-"))
        beside.chmod(0o755)
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--out is '{folder}', which cannot be made: {error.strerror or error}",
            "name a folder that you may write to",
        ) from None
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
