"""Callbacks that a configuration names."""
