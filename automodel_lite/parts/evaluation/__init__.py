"""The scores of held-out answers that a `_target_` may name."""
