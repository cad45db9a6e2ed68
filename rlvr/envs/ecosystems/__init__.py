"""Environments of other projects, by a reference `kind:name`."""
