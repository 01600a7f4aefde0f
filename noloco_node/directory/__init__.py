"""Who serves which stage: signed records in hivemind's DHT, what this node makes of them, and whom it asks for proof.

May import `bootstrap`, `transport` and below.
"""
