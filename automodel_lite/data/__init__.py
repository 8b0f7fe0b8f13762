"""From files to batches: documents, token rows, pack plans, packs, loaders.

Knows: what a rank reads, and in which order. Imports: parallel and the rooms below, never `run`.
"""
