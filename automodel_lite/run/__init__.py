"""A run on disk: its folder, lock, checkpoints, export, and how a process ends.

Knows: files that survive the process. Imports: parallel and the rooms below, never `data`.
"""
