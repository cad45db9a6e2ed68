"""The lowest layer: records, messages, protocols, random numbers, files, cancellation. No heavy library."""
