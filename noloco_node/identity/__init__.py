"""The identity of a node: keys, peer ids, signatures, invitations, and the addresses at which peers are found.

Knows no network: it may import configuration and storage.
"""
