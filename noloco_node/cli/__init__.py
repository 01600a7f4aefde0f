"""The commands: what they understand, and what they print."""
