"""Environments of ours as packages and folders of other projects: `rlvr env export NAME --to verifiers`."""
