"""A server that speaks the protocol of the public `tinker` SDK over the local engine."""
