"""From settings to a run: the weights at a path, the objects of a run, its plan, and the evaluation of weights.

    assembly = assemble(build_config(load("arithmetic")))   # environment, rewards and algorithm, each made once
    lines = plan(assembly)                                  # what the run will do, in words
    job = build_job(assembly, folder, say, warn)            # what `rlvr.training.loop` runs

`weights` opens what is at a path or an address. Lower layers know of no config; the commands, the study, the benchmarks
and both servers build on this one.
"""
