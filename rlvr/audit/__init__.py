"""Measure verifiers: grade a file of completions, count mistakes on labelled rows, run the attack suite.

The commands:

    rlvr verify completions.jsonl --reward code --out verdicts.jsonl
    rlvr audit --reward math --labelled builtin --against rlvr.audit.peers:math_verify
    rlvr audit --reward code --attack
    rlvr audit --env reasoning_gym
"""
