"""Parts of `benchmarks/gpu_check.py`: what is measured on a GPU."""
