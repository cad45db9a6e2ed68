"""Measure verifiers and environments: grade completions, count mistakes on labelled rows, attack, check.

The commands:

    rlvr verify completions.jsonl --reward code --out verdicts.jsonl
    rlvr audit --reward math --labelled builtin --against rlvr.audits.peers:math_verify
    rlvr audit --reward code --attack
    rlvr audit --env reasoning_gym
    rlvr env check sorting
"""
