"""The peers that this node deals with: the admitted ones, what audits have said of them, and the work it has seen of
them.

May import `directory` and below. Bans for broken messages are the transport's own.
"""
