"""Training runs, samples, futures, limits and storage: the Tinker server without HTTP."""
