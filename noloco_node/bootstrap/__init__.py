"""A stranger's way in: the first word between two nodes, the RunSpec behind a run id, whether others reach this node.

May import `libp2p`, `transport` and below.
"""
