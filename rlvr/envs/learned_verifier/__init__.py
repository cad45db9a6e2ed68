"""A policy and a verifier that learns: the verifier is paid for the truth where it is known, the policy by its word."""
