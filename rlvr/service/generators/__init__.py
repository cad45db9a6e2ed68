"""Generators: the models that work on sessions, behind a URL or in an engine."""
