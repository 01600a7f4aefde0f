"""What the clock decides: the learning rate, and how many tokens stand behind an inner step."""

from __future__ import annotations

import math

FREE_LAG = 0.05
"""Share of the lag that is allowed between replicas within which a stage's clock is not tied."""
PACE_A_LAG = 2.0
"""By how much faster or slower a clock runs for each such lag beyond it. With more the clocks of short windows swing:
what is heard of the origins is some microbatches old."""
SLOWEST_PACE = 0.5
FASTEST_PACE = 1.5
"""Bounds of `tied_pace`: what a stage is told of its origins may be a lie."""


def learning_rate(clock: float, *, peak: float, minimum_ratio: float, warmup: int, target: int) -> float:
    """Linear warm-up, then a cosine from `peak` to `peak · minimum_ratio` at `target`; all times in swarm tokens."""
    if clock < warmup:
        return peak * clock / warmup
    progress = min(1.0, (clock - warmup) / max(1, target - warmup))
    return peak * (minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def tied_pace(lead: float | None, lag: float) -> float:
    """By how much faster or slower a later stage counts its own tokens.

    So its clock stays with the clocks of the origins whose microbatches it trains. They are ahead of it by `lead` swarm
    tokens; None if that is not known. `lag` is in swarm tokens as well. Within `FREE_LAG` of `lag` the stage keeps its
    own time: clocks of replicas differ between two outer steps. A clock that is ahead by a tenth of `lag` more runs a
    fifth slower. So no miscount of replicas or of work moves a clock further than a part of `lag` from the others.
    """
    if lead is None:
        return 1.0
    behind = lead / lag
    beyond = PACE_A_LAG * max(0.0, abs(behind) - FREE_LAG)
    return min(FASTEST_PACE, max(SLOWEST_PACE, 1.0 + math.copysign(beyond, behind)))


def share_of_batch(global_batch_tokens: int, live_replicas: int) -> float:
    """Tokens after which a replica takes an inner step; where that is less than a microbatch, each microbatch is a
    step."""
    return global_batch_tokens / max(1, live_replicas)


def credit_after_step(gathered: int, credit: float, share: float) -> float | None:
    """Whether an inner step is due on `gathered` tokens: None if not, else the tokens that count towards the next one.

    Those are the tokens beyond `share`, at most one share: a burst is not followed by steps on hardly any tokens."""
    if gathered + credit < share:
        return None
    return min(gathered + credit - share, share)
