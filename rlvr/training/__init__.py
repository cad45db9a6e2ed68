"""Training: one step (collect, update), the loops over it, evaluation, and the journal that makes runs resumable."""
