"""What a `_target_` or the value of a setting names: kernels, losses, adapters, optimizers,
datasets, formats, exchanges, trackers. The core finds each by its dotted path, and imports none.
"""
