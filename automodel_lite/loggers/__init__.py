"""Where metrics go: the screen, metrics.jsonl, trackers."""
