"""Files and rows to documents: readers, columns.

Knows: one row at a time. Imports: config, the ground.
"""
