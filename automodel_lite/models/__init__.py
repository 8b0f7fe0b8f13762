"""Hugging Face models: built or loaded, with the loss as their output, and exported."""
