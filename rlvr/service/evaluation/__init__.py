"""The evaluation suite: checkable tasks for a running service (`rlvr evaluate-service`)."""
