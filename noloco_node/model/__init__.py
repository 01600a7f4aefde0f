"""A Hugging Face causal language model: cut into pipeline stages, first weights, export back to one model."""
