"""Bits a byte, by hand: what tokens stand for in bytes of text, whatever cuts a character in two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from noloco_node.config.data_spec import DataSpec
from noloco_node.exporting.evaluation import Score, text_bytes

TEXT = "día tras día – schön, 日本語 und 日 x"
END = "<|endoftext|>"


def byte_level() -> Any:
    """A tokenizer of GPT-2's kind: a token's name has a character for each byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["día tras día"] * 9, trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return made


def of_sentencepiece() -> Any:
    """A tokenizer of SentencePiece's kind: a space is a character of its own, what is not known are single bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    known = [END, *(f"<0x{number:02X}>" for number in range(256))]
    made.train_from_iterator(["día tras día"] * 9, trainers.BpeTrainer(special_tokens=known, show_progress=False))
    return made


@pytest.mark.parametrize("make", [byte_level, of_sentencepiece])
def test_tokens_stand_for_the_bytes_of_their_text_however_it_is_cut(make: Any, tmp_path: Path) -> None:
    """It is cut in windows of two tokens, some of which begin or end within a character. Not a byte is lost or counted
    twice, and the mark between documents is no text. (Decoding each window by itself counts three bytes for each
    piece.)"""
    backend = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token=END)
    backend.save_pretrained(tmp_path)
    ids = backend.encode(TEXT, add_special_tokens=False)
    cut = [[token for token in ids[start : start + 2]] for start in range(0, len(ids), 2)]
    windows = [torch.tensor([*window, backend.eos_token_id]) for window in cut]
    assert text_bytes(DataSpec(tokenizer=str(tmp_path)), windows) == len(TEXT.encode())
    by_window = sum(len(backend.decode(window).encode()) for window in cut)
    assert by_window != len(TEXT.encode()), "this text would show nothing"


def test_bits_a_byte_of_a_known_model_are_what_a_hand_works_out() -> None:
    """A model that knows nothing of 256 ids needs 8 bits for each; of 512 in tokens of 4 bytes, 9 bits for 4."""
    assert text_bytes(DataSpec(), [torch.zeros(3, 5, dtype=torch.int64)]) == 15
    assert Score(math.log(256), tokens=15, text_bytes=15).bits_per_byte == pytest.approx(8.0)
    score = Score(math.log(512), tokens=100, text_bytes=400)
    assert (score.bits_per_byte, score.perplexity) == (pytest.approx(9 / 4), pytest.approx(512))
