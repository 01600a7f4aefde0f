"""Devices by name: what memory they have, and how quickly they compute."""

from __future__ import annotations

import re
from dataclasses import dataclass

from noloco_node.config.run_spec import PrecisionName
from noloco_node.errors import ExitCode, UserError
from noloco_node.training.compute_device import entry_of, peak_of

REACHED = 0.4
"""Training on a device that never waits reaches this share of its maker's peak: 0.3 to 0.5 is usual."""

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
