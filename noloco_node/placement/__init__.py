"""Which stage a node serves, where its first state comes from, when a run begins and when it is over. Pure decisions.

May import `directory`, `trust` and below; knows nothing of `pipeline`, `averaging` and `state_transfer`.
"""
