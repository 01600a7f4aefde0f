"""Settings: what all nodes of a run must agree on, what one volunteer chooses, and how a file becomes either."""
