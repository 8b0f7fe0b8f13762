"""Documents to token rows: chat templates, tokenization, the memory-mapped cache.

Knows: one document at a time. Imports: `data.reading`, config, the ground.
"""
