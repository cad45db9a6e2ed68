"""Learning from sessions: the weights of an engine, or the prompting strategy for an endpoint."""
