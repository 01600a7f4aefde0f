"""The peers that this node deals with: the admitted ones, and those of its life of the run.

May import `directory` and below. Bans for broken messages are in `peers`.
"""
