"""Sessions: sample an answer, verify it, store it, and refine it with the feedback."""
