"""From settings to a run: the weights at a path, the objects of a run, its plan, and the evaluation of weights.

    assembly = assemble(build_config(load("arithmetic")))   # environment, reward, verifiers, algorithm: each made once
    print(describe_run(assembly))                           # `plan`: what it will do
    job = build_job(assembly, folder, say, warn)            # what `rlvr.training.loop` runs

`weights` says what is at a path or an address and opens it. Lower layers know of no config; the commands, the study,
the benchmarks and both servers build on this one.
"""
