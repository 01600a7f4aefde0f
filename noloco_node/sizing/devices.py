"""Devices by name: what memory they have, and how quickly they compute."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from noloco_node.config.run_spec import PrecisionName
from noloco_node.errors import ExitCode, UserError

REACHED = 0.4
"""Training on a device that never waits reaches this share of its maker's peak: 0.3 to 0.5 is usual."""

PEAK_TFLOP_PER_SECOND = {
    "B200": {"bf16": 2250.0, "fp32": 80.0},
    "H200 NVL": {"bf16": 835.5, "fp32": 60.0},
    "H200": {"bf16": 989.4, "fp32": 66.9},
    "H100 PCIe": {"bf16": 756.5, "fp32": 51.2},
    "H100 NVL": {"bf16": 835.5, "fp32": 60.0},
    "H100": {"bf16": 989.4, "fp32": 66.9},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A40": {"bf16": 149.7, "fp32": 37.4},
    "A10G": {"bf16": 70.0, "fp32": 35.0},
    "A10": {"bf16": 125.0, "fp32": 31.2},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "L40": {"bf16": 181.0, "fp32": 90.5},
    "L4": {"bf16": 121.0, "fp32": 30.3},
    "RTX 6000 Ada": {"bf16": 364.2, "fp32": 91.1},
    "RTX A6000": {"bf16": 154.8, "fp32": 38.7},
    "RTX 5090": {"bf16": 209.5, "fp32": 104.8},
    "RTX 4090": {"bf16": 165.2, "fp32": 82.6},
    "RTX 4080 SUPER": {"bf16": 104.4, "fp32": 52.2},
    "RTX 4080": {"bf16": 97.5, "fp32": 48.7},
    "RTX 4070 Ti SUPER": {"bf16": 88.2, "fp32": 44.1},
    "RTX 4070 Ti": {"bf16": 80.2, "fp32": 40.1},
    "RTX 4070 SUPER": {"bf16": 71.0, "fp32": 35.5},
    "RTX 4070": {"bf16": 58.3, "fp32": 29.1},
    "RTX 4060 Ti": {"bf16": 44.1, "fp32": 22.1},
    "RTX 4060": {"bf16": 30.2, "fp32": 15.1},
    "RTX 3090 Ti": {"bf16": 80.0, "fp32": 40.0},
    "RTX 3090": {"bf16": 71.0, "fp32": 35.6},
    "RTX 3080 Ti": {"bf16": 68.2, "fp32": 34.1},
    "RTX 3080": {"bf16": 59.5, "fp32": 29.8},
    "RTX 3070 Ti": {"bf16": 43.5, "fp32": 21.7},
    "RTX 3070": {"bf16": 40.6, "fp32": 20.3},
    "RTX 3060 Ti": {"bf16": 32.4, "fp32": 16.2},
    "RTX 3060": {"bf16": 25.5, "fp32": 12.7},
    "V100 PCIe": {"fp32": 14.0},
    "V100": {"fp32": 15.7},
    "T4": {"fp32": 8.1},
    "MI300X": {"bf16": 1307.4, "fp32": 163.4},
    "RX 7900 XTX": {"bf16": 122.8, "fp32": 61.4},
    "RX 7900 XT": {"bf16": 103.0, "fp32": 51.5},
}
"""By a part of the device's name, as its maker says: dense, without sparsity; fp32 without tensor cores, which torch
leaves aside for it."""

_KIN = frozenset(("ti", "super", "d", "nvl", "laptop", "mobile", "max"))
"""Words by which a maker tells a device from another of the same number."""
_A_PART = re.compile(r"mig|\d+[abcq]")
"""Words by which a driver tells that a device is a part of one: MIG and virtual GPUs."""

MEMORY_GIB = {
    "B200": 180,
    "H200 NVL": 141,
    "H200": 141,
    "H100 NVL": 94,
    "H100": 80,
    "A100": 40,
    "A40": 48,
    "A10G": 24,
    "A10": 24,
    "L40S": 48,
    "L40": 48,
    "L4": 24,
    "RTX 6000 Ada": 48,
    "RTX A6000": 48,
    "RTX 5090": 32,
    "RTX 4090": 24,
    "RTX 4080 SUPER": 16,
    "RTX 4080": 16,
    "RTX 4070 Ti SUPER": 16,
    "RTX 4070 Ti": 12,
    "RTX 4070 SUPER": 12,
    "RTX 4070": 12,
    "RTX 4060 Ti": 8,
    "RTX 4060": 8,
    "RTX 3090 Ti": 24,
    "RTX 3090": 24,
    "RTX 3080 Ti": 12,
    "RTX 3080": 10,
    "RTX 3070 Ti": 8,
    "RTX 3070": 8,
    "RTX 3060 Ti": 8,
    "RTX 3060": 12,
    "V100": 16,
    "T4": 16,
    "MI300X": 192,
    "RX 7900 XTX": 24,
    "RX 7900 XT": 20,
}
"""The least memory that is sold under that name, in GiB."""

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
        known = ", ".join(MEMORY_GIB)
        raise UserError(
            ExitCode.USAGE,
            f"--device '{name}' is not in the table of devices with a speed in {precision}",
            f"name one of {known}, or say what it reaches: --device 20TFLOP",
        )
    gib = MEMORY_GIB.get(entry_of(name, MEMORY_GIB) or "")
    return Device(name, REACHED * peak, None if gib is None else gib << 30)


def peak_of(device: str, precision: str) -> float | None:
    """FLOP/s of a device by its own name at a precision of `inner.precision`; None where that is not known. All
    precisions that compute in bf16 have one peak."""
    peaks = PEAK_TFLOP_PER_SECOND.get(entry_of(device, PEAK_TFLOP_PER_SECOND) or "", {})
    peak = peaks.get(precision.partition("-")[0])
    return None if peak is None else 1e12 * peak


def entry_of(device: str, entries: Iterable[str]) -> str | None:
    """Which of these devices one is, by its own name: the entry with most of its words. None where it is none of them,
    or a kin of one, or a part of one."""
    words = _words(device)
    if any(_A_PART.fullmatch(word) for word in words):
        return None
    within = [entry for entry in entries if _words(entry) <= words]
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
