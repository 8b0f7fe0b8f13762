"""Hugging Face models: built or loaded, with the loss as their output.

Knows: layers, heads, adapters; no ranks and no files of data. Imports: attention and the rooms
below.
"""
