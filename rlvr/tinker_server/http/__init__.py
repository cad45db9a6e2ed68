"""HTTP of the Tinker server: the routes of the protocol, OpenAI's endpoints, and the middleware before them."""
