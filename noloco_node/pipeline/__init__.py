"""A microbatch's way through the stages and back: its source, the choice of the next peer, the checks and the counts.

May import `directory`, `trust` and below; knows nothing of `averaging`, `state_transfer` and `placement`.
"""
