"""hivemind's p2pd as this node's child process: started, watched, started again; TLS probes of strangers, and relays.

May import `transport` and below.
"""
