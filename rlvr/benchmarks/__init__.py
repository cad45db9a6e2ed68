"""Published benchmarks of a model: `rlvr evaluate ./my-model gsm8k math500`.

A benchmark is a config of the group `benchmarks`: an environment, a prompt form, a strict reward, and a lenient one
among the watched. `benchmark_plan` reads what was asked for, `benchmark_runner` samples, judges
and writes the table, `benchmark_folder` keeps every completion and verdict.
"""
