"""Ranks: the device mesh, sharding of the model, context parallelism, messages between hosts.

Knows: process groups. Imports: models and the rooms below.
"""
