"""Whom this node deals with: who is admitted to the run, what audits have said, whose work it has seen.

May import `directory` and below. Bans for broken messages are the transport's own.
"""
