"""Training runs: requests in order, the adapters they train, the thread that executes them."""
