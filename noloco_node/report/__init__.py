"""What a run folder tells: one page and a few pictures made of the event files in it."""
