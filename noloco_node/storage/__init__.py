"""What stays on disk: run folders and the weights of a stage, never half-written under their final names."""
