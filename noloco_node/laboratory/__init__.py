"""Experiments: whole swarms in one process, with the arithmetic of the node, without its network.

May import the pure decisions of `pipeline` and what lies below.
"""
