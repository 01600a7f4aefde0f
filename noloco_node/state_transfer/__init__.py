"""A replica's state on its way to another: for joiners, for backups of other stages, and for exporters of the model.

May import `directory`, `trust` and below; knows nothing of `pipeline`, `averaging` and `placement`.
"""
