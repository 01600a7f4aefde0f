"""What may be chosen of the outer step, by name: the lists that settings and mathematics share."""

from __future__ import annotations

from typing import Literal

CodecName = Literal["fp32", "fp16", "int8", "int4", "dct", "sign"]
"""The names of the codecs; `codec.CODECS` has one of each."""
Momentum = Literal["averaged", "local"]
