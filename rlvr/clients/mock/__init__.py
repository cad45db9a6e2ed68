"""A policy that is a table of token logits in numpy and truly learns: runs and tests without torch."""
