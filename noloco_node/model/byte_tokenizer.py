"""The byte tokenizer as an ordinary Hugging Face tokenizer, for exported models."""

from __future__ import annotations

from typing import Any


def build_byte_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` whose 256 tokens are the bytes of UTF-8 text: token id = byte value. It is a
    byte-level BPE without merges and without special tokens, so that transformers loads it with nothing of ours
    installed. Bytes that are no text decode to the replacement character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _byte_characters() -> dict[str, int]:
    """The character that the byte-level format uses for each byte -> the byte.

    Visible Latin-1 characters stand for themselves; the other 68 bytes follow from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in sorted(visible)} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
