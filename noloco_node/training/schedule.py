"""What the clock decides: the learning rate, and how many tokens stand behind an inner step."""

from __future__ import annotations

import math


def learning_rate(clock: float, *, peak: float, minimum_ratio: float, warmup: int, target: int) -> float:
    """Linear warm-up, then a cosine from `peak` to `peak · minimum_ratio` at `target`; all times in swarm tokens."""
    if clock < warmup:
        return peak * clock / warmup
    progress = min(1.0, (clock - warmup) / max(1, target - warmup))
    return peak * (minimum_ratio + (1 - minimum_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def share_of_batch(global_batch_tokens: int, live_replicas: int, max_replicas: int) -> float:
    """Tokens after which a replica takes an inner step."""
    return global_batch_tokens / min(max(1, live_replicas), max_replicas)


def credit_after_step(gathered: int, credit: float, share: float) -> float | None:
    """Whether an inner step is due on `gathered` tokens: None if not, else the tokens beyond `share` that count
    towards the next one (at most one share, so that a burst is not followed by steps on hardly any tokens)."""
    if gathered + credit < share:
        return None
    return min(gathered + credit - share, share)
