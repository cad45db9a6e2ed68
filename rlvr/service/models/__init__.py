"""Models in this process: the one that sessions are answered with, one that replicas share, and a judge."""
