"""The outer step as pure tensor mathematics: no network, no model, no settings object."""
