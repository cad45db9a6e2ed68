"""Games of several roles, of which the policy plays all (self-play) or one against an opponent."""
