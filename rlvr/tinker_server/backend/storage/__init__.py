"""What survives a restart: the request log, sessions, checkpoints, and read queries."""
