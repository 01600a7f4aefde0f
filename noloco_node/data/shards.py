"""A text in shards, of which each is read when it is needed, and no further than it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from noloco_node.config.data_spec import SHARDS, DataSpec
from noloco_node.data.documents import Document, unreadable
from noloco_node.data.encoding import encode
from noloco_node.data.formats import HEAD_BYTES
from noloco_node.data.hub import ShardReader, hub_shards
from noloco_node.data.loaders import load
from noloco_node.data.places import SourceFile, find_files
from noloco_node.data.sources import is_held_out, warn_of_left_out
from noloco_node.data.tokenizers import Tokenizer, Tokens


class TextShards:
    """The tokens of a text, document by document, shard by shard, tokenised as it is read. Raises UserError (DATA)."""

    def __init__(self, spec: DataSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self.names, self._readers = _readers(spec)
        """The names of the shards, for a person, in the order that all machines agree on, and what reads each."""

    def training(self, shard: int, part: int, parts: int) -> Iterator[Tokens]:
        """The tokens of the shard's training documents whose number is `part` modulo `parts`."""
        number = 0
        for document in self.documents(shard):
            if not is_held_out(document, self._spec):
                if number % parts == part:
                    yield encode(document, self._tokenizer, self._spec)
                number += 1

    def held_out(self, shard: int) -> Iterator[Tokens]:
        """The documents of the shard that are held out."""
        for document in self.documents(shard):
            if is_held_out(document, self._spec):
                yield encode(document, self._tokenizer, self._spec)

    def documents(self, shard: int) -> Iterator[Document]:
        """Those that are not blank."""
        return (document for document in self._readers[shard]() if not document.is_blank)


def shard_files(spec: DataSpec) -> tuple[SourceFile, ...]:
    """The shards of a text on this machine. Raises UserError (DATA) as `find_files` does."""
    return find_files(spec.path or "", spec.split, spec.encoding).files


def fingerprint_of_shards(files: Sequence[SourceFile]) -> str:
    """A fingerprint of the places, sizes, beginnings and ends of the files: streaming is to avoid reading all of them.
    Raises UserError (DATA) if one cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            with file.path.open("rb") as opened:
                ends = opened.read(HEAD_BYTES)
                opened.seek(max(len(ends), file.size - HEAD_BYTES))
                ends += opened.read(HEAD_BYTES)
        except OSError as error:
            raise unreadable(file.path, error) from None
        key = file.key.encode("utf-8", errors="surrogateescape")
        found.update(b"".join(number.to_bytes(8, "little") for number in (len(key), file.size, len(ends))) + key + ends)
    return SHARDS + found.hexdigest()


def _readers(spec: DataSpec) -> tuple[list[str], list[ShardReader]]:
    if spec.source == "huggingface":
        readers = hub_shards(spec)
        return [f"shard {number} of '{spec.path}'" for number in range(len(readers))], readers
    found = find_files(spec.path or "", spec.split, spec.encoding)
    warn_of_left_out(found, f"run.data.path '{spec.path}'")
    files = found.files
    return [file.name for file in files], [lambda file=file: load(file, spec.text_field) for file in files]
