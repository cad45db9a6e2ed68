"""HTTP: routes, schemas and the binary encoding of the Tinker protocol."""
