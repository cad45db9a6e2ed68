"""Conversations: chat templates, calls of tools in them, and turns token for token."""
