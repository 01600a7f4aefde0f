"""noloco_node: train one language model on many GPUs that nobody owns together."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 5
"""Two nodes must share this to talk at all; every handshake compares it, every incompatible change raises it."""
