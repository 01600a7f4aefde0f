"""What a run asks of machines and links, before it runs."""
