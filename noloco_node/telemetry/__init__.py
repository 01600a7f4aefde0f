"""What a node tells of itself: typed events, and metrics, logs, screens and pages that are fed by the same events."""
