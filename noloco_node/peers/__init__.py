"""What this node thinks of its peers: one scorecard for each, by dealings of its own.

A scorecard costs its peer nothing, so all of them together are bounded. May import `identity` and below.
"""
