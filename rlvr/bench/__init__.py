"""`rlvr bench`: what this machine does in a second, ours beside others' in one run. `measure` has the words."""
