"""What this machine offers to others over HTTP."""
