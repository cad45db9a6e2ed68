"""Environments by Gym's contract, `reset` and `step`, as episodes of text."""
