"""The outer step between two replicas of a stage: the choice of a partner, the exchange, and the probation of
newcomers.

May import `directory`, `trust` and below; knows nothing of `pipeline`, `state_transfer` and `placement`.
"""
