"""The public functions that users of NeMo AutoModel's packed-sequence path know, as faces of this program's own.

Imports: the rooms that it shows. Nothing imports it.
"""
