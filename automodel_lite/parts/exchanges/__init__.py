"""Exchanges of context-parallel ranks that `mesh.cp_exchange` names, beside those of the core."""
