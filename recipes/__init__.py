"""The programs that people run; each is read from top to bottom."""
