"""What a run folder tells: one page, made of the event files in it."""
