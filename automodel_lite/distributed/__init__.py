"""Processes: the device mesh, sharding of the model, context parallelism."""
