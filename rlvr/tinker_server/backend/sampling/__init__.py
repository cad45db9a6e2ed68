"""Sampling: sessions, the fair queue, heartbeats and quotas."""
