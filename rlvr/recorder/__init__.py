"""Records the calls that programs make of a policy, token for token, and makes the rows that they train."""
