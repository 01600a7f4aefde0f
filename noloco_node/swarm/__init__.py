"""Everything that talks to peers: identity, transport, directory, routing, pipeline, pairing, state transfer."""
