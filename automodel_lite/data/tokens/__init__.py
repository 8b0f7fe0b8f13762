"""Documents to token rows: chat templates, tokenization, memory-mapped rows.

Knows: one document at a time. Imports: `data.reading`, config, the ground.
"""
