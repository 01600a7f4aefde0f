"""The directory: signed records in hivemind's DHT that say which peer serves which stage.

It also holds what this node makes of the records, and the calls that ask peers for proof. May import `bootstrap`,
`transport` and below.
"""
