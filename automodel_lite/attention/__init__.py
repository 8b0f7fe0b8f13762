"""Packed attention kernels, one per file, their interface to transformers, and the isolation probe.

Knows: one stream of tokens and its document boundaries. Imports: config, the ground.
"""
