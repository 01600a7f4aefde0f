"""A microbatch's way through the stages and back: where it comes from, who gets it next, what is checked and counted.

May import `directory`, `trust` and below; knows nothing of `averaging`, `state_transfer` and `placement`.
"""
