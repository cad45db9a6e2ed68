"""The evaluation suite: tasks whose answers can be checked, put to a running service (`rlvr evaluate-service`)."""
