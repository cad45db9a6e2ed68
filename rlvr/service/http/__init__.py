"""REST: the door, the routes, what they take and answer, and the service they share."""
