"""Documents to token rows: renderings, tokenization, memory-mapped rows.

Knows: one document at a time. Imports: `data.reading`, config, the ground.
"""
