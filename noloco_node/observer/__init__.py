"""A swarm looked at from outside, without taking part in it.

May import `directory`, `trust` and below.
"""
