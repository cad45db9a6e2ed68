"""Storage: the request log, checkpoints, their encryption, and read queries."""
