"""The node's own code in virtual time: an event loop whose clock jumps, and a device that takes modelled time."""
