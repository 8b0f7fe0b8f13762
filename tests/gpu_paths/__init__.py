"""What only a GPU runs, found out without one: `make test-gpu-paths`, on the pinned and on the oldest versions."""
