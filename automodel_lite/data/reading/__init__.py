"""Files and rows to documents: readers, formats, columns.

Knows: one row at a time. Imports: config, the ground.
"""
