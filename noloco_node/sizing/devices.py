"""Devices by name: what memory they have, and how quickly they compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

from noloco_node.config.run_spec import PrecisionName
from noloco_node.errors import ExitCode, UserError

REACHED = 0.4
"""Training on a device that never waits reaches this share of its maker's peak: 0.3 to 0.5 is usual."""


@dataclass(frozen=True, slots=True)
class Card:
    """A device as its maker tells of it."""

    gib: int
    """The least memory that is sold under that name."""
    bf16: float | None
    """TFLOP/s at the peak: dense, without sparsity. None for a device that does not compute in bf16."""
    fp32: float
    """On tensor cores as TF32, where it has them: half of bf16 (`compute_device.use_tensor_cores`)."""


CARDS = {
    "B200": Card(180, 2250.0, 1125.0),
    "H200 NVL": Card(141, 835.5, 417.8),
    "H200": Card(141, 989.4, 494.7),
    "H100 PCIe": Card(80, 756.5, 378.2),
    "H100 NVL": Card(94, 835.5, 417.8),
    "H100": Card(80, 989.4, 494.7),
    "A100": Card(40, 312.0, 156.0),
    "A40": Card(48, 149.7, 74.8),
    "A10G": Card(24, 70.0, 35.0),
    "A10": Card(24, 125.0, 62.5),
    "L40S": Card(48, 362.0, 181.0),
    "L40": Card(48, 181.0, 90.5),
    "L4": Card(24, 121.0, 60.5),
    "RTX 6000 Ada": Card(48, 364.2, 182.1),
    "RTX A6000": Card(48, 154.8, 77.4),
    "RTX 5090": Card(32, 209.5, 104.8),
    "RTX 4090": Card(24, 165.2, 82.6),
    "RTX 4080 SUPER": Card(16, 104.4, 52.2),
    "RTX 4080": Card(16, 97.5, 48.7),
    "RTX 4070 Ti SUPER": Card(16, 88.2, 44.1),
    "RTX 4070 Ti": Card(12, 80.2, 40.1),
    "RTX 4070 SUPER": Card(12, 71.0, 35.5),
    "RTX 4070": Card(12, 58.3, 29.1),
    "RTX 4060 Ti": Card(8, 44.1, 22.1),
    "RTX 4060": Card(8, 30.2, 15.1),
    "RTX 3090 Ti": Card(24, 80.0, 40.0),
    "RTX 3090": Card(24, 71.0, 35.6),
    "RTX 3080 Ti": Card(12, 68.2, 34.1),
    "RTX 3080": Card(10, 59.5, 29.8),
    "RTX 3070 Ti": Card(8, 43.5, 21.7),
    "RTX 3070": Card(8, 40.6, 20.3),
    "RTX 3060 Ti": Card(8, 32.4, 16.2),
    "RTX 3060": Card(12, 25.5, 12.7),
    "V100 PCIe": Card(16, None, 14.0),
    "V100": Card(16, None, 15.7),
    "T4": Card(16, None, 8.1),
    "MI300X": Card(192, 1307.4, 163.4),
    "RX 7900 XTX": Card(24, 122.8, 61.4),
    "RX 7900 XT": Card(20, 103.0, 51.5),
}
"""The cards that are known, each by a part of its name."""

_KIN = frozenset(("ti", "super", "d", "nvl", "laptop", "mobile", "max"))
"""Words by which a maker tells a device from another of the same number."""
_A_PART = re.compile(r"mig|\d+[abcq]")
"""Words by which a driver tells that a device is a part of one: MIG and virtual GPUs."""

_SPEED = re.compile(r"^\s*([0-9.]+)\s*TFLOP(?:/s|s)?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """One device as the plan sees it."""

    name: str
    flop_per_second: float
    """That training reaches on it."""
    memory: int | None
    """Bytes; None where it is not known."""


def device_by_name(name: str, precision: PrecisionName) -> Device:
    """A device of the table, or one that reaches so many `TFLOP`.

    Raises UserError (USAGE) where it is neither, or where nothing is known of it in this precision.
    """
    if speed := _SPEED.match(name):
        return Device(name.strip(), 1e12 * _number(speed.group(1), name), None)
    peak = peak_of(name, precision)
    if peak is None:
        known = ", ".join(CARDS)
        raise UserError(
            ExitCode.USAGE,
            f"--device '{name}' is not in the table of devices with a speed in {precision}",
            f"name one of {known}, or say what it reaches: --device 20TFLOP",
        )
    return Device(name, REACHED * peak, CARDS[entry_of(name) or ""].gib << 30)


def peak_of(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its own name at a precision of `inner.precision`; None where that is not known. All
    precisions that compute in bf16 have one peak."""
    card = CARDS.get(entry_of(device) or "")
    peak = card and (card.fp32 if precision == "fp32" else card.bf16)
    return None if peak is None else 1e12 * peak


def entry_of(device: str) -> str | None:
    """Which device of the table one is, by its own name: the entry with most of its words. None where it is none of
    them, or a kin of one, or a part of one."""
    words = _words(device)
    if any(_A_PART.fullmatch(word) for word in words):
        return None
    within = [entry for entry in CARDS if _words(entry) <= words]
    longest = max(within, key=lambda entry: len(_words(entry)), default=None)
    return None if longest is None or (words - _words(longest)) & _KIN else longest


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s-]+", name.casefold()))


_RATES = {"bit": 0.125, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_TIMES = {"ms": 1e-3, "s": 1.0}


def bytes_a_second(text: str) -> float:
    """What `20Mbit` or `2.5MB` a second come to. UserError (USAGE) where it is no such thing."""
    return _quantity("--uplink", text, _RATES, "20Mbit, 1Gbit or 2.5MB (a second)")


def seconds(text: str) -> float:
    """What `100ms` or `0.1s` come to. UserError (USAGE) where it is no such thing."""
    return _quantity("--round-trip", text, _TIMES, "100ms or 0.1s")


def _quantity(option: str, text: str, units: dict[str, float], example: str) -> float:
    found = re.match(r"^\s*([0-9.]+)\s*([A-Za-z]+)\s*$", text)
    unit = None if found is None else next((u for u in units if u.lower() == found.group(2).lower()), None)
    if found is None or unit is None:
        raise UserError(ExitCode.USAGE, f"{option} is '{text}'", f"give a number and a unit: {example}")
    return units[unit] * _number(found.group(1), text)


def _number(digits: str, text: str) -> float:
    try:
        value = float(digits)
    except ValueError:
        value = 0.0
    if value <= 0.0:
        raise UserError(ExitCode.USAGE, f"'{text}' holds no number above 0", "such as 20Mbit, 100ms or 20TFLOP")
    return value
