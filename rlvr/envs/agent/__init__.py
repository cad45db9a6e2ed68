"""Environment `agent`: episodes that a program plays which knows nothing of training."""
