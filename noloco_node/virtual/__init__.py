"""The laboratory: many replicas in one process, on the daemon's own outer step, routing and pairing decisions."""
