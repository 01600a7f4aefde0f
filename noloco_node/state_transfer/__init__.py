"""A replica's state on its way to another: for joiners, for backups of other stages, and for who takes the model home.

May import `directory`, `trust` and below; knows nothing of `pipeline`, `averaging` and `placement`.
"""
