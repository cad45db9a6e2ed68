"""Sessions: refined until verified, kept in the store, and learned from."""
