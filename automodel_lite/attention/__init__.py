"""Packed attention kernels, one a file, and their adapter to transformers."""
