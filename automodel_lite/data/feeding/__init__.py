"""Packs to the device: epoch order, mixtures, streams, workers that read ahead.

Knows: packs, steps and data-parallel ranks. Imports: the rest of `data`, parallel, models, the
ground.
"""
