"""A model out of a run: from the folders that its nodes left, or from the nodes themselves while they train."""
