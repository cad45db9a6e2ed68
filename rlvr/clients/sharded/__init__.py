"""`client=sharded`: one policy trained by several processes (ranks), each with a part of every weight.

`sharded_client` is the client, in the driver's process; `adapter_trainers` trains the adapters of the engine server.
`split_call` splits the data of a call and computes it on all ranks, `rank_group` sends one command at a time.
`rank_processes` starts the ranks on this machine, `ray_ranks` on a Ray cluster; `rank_worker` is what
each of them runs. `docs/scale/many-processes.md` says how to use it.
"""
