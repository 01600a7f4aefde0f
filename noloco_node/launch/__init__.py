"""Many daemons at once: a local swarm, one daemon for each device, a local run to its exported model."""
