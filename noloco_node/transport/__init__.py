"""Requests and answers between peers, with tensors: one interface, over libp2p and in memory.

Every message is checked here, and peers that break the rules are banned. May import `identity`. Knows neither directory
nor pipeline.
"""
