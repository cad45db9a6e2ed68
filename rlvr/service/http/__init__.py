"""The REST API: routes, request and response models, middleware, and the running service."""
