"""The peers that this node deals with: the admitted ones, those of its life of the run, and the origins it has seen.

May import `directory` and below. Bans for broken messages are the transport's own.
"""
