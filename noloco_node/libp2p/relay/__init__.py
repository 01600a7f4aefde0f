"""Relays for nodes that nobody can dial: the messages, the serving side, and places with relays of others."""
