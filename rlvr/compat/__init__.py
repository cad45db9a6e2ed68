"""Compatibility with the Tinker cookbook: its environments, renderers, model names and recipes."""
