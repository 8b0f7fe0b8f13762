"""Ranks: meshes, context parallelism, sharding. Nothing outside of this package knows about them but attention."""
