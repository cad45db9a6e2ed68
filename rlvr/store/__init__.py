"""Experiences in SQL: what was asked, answered, verified and learned, by whom and with which weights."""
