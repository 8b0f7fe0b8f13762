"""Where metrics go: the screen, metrics.jsonl, trackers.

Knows: numbers of a step. Imports: run, data and the rooms below.
"""
