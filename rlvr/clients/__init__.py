"""Sampling and training clients, which implement the protocols of `rlvr.core.protocols`."""
