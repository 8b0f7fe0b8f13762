"""How held-out questions are scored."""
