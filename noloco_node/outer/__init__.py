"""The outer step as pure tensor mathematics: no network, no model, no settings object."""

from __future__ import annotations

from typing import Literal

CodecName = Literal["fp32", "fp16", "int8", "int4", "dct", "sign"]
"""The names of the codecs; `codec.CODECS` has one of each."""
Momentum = Literal["averaged", "local"]
