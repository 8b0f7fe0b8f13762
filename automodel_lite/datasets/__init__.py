"""From files to token rows: documents are read and normalised, tokenised once, and kept as memory-mapped arrays."""
