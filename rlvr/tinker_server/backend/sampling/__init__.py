"""Sampling: requests of clients, served runs, and vLLM servers that sample."""
