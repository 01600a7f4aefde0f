"""Requests and answers between peers, with tensors: one interface, over libp2p and in memory; what is checked of every
message, and what becomes of peers that break the rules.

May import `identity`. Knows neither directory nor pipeline.
"""
