"""The service of sessions (`rlvr serve`): REST, sessions, learning, generators, dashboard and evaluation suite."""
