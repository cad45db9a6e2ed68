"""Tools that a policy calls during its episodes: typed functions, their calls, and the episodes around them."""
