"""Check an environment: `rlvr env check REF` tries its contract, its verifier, leaks, its signal and how it is gamed.

    report = check_environment("my_game:Game", {}, CheckOptions())
    report.faults        # the checks that found a fault

`text_tokenizer` and `scripted_play` play episodes with given turns, the files `*_checks` hold the checks, and
`environment_check` runs them. Names of checks are those of OpenEnv's `openenv validate` where they mean the same.
"""
