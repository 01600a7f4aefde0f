"""noloco_node: train one language model on many GPUs that nobody owns together."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 3
"""What two nodes must share to talk at all; compared in every handshake, raised by every incompatible change."""
