"""What a `_target_` of conf/ names: kernels, losses, adapters, optimizers, datasets, trackers; no
core imports it.
"""
