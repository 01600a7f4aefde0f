"""An outer step between two replicas of a stage: whom to meet, the exchange itself, and who does not count yet.

May import `directory`, `trust` and below; knows nothing of `pipeline`, `state_transfer` and `placement`.
"""
