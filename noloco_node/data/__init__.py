"""Text into packed windows of tokens: sources, tokenizers, the split, and an exactly resumable walk."""
