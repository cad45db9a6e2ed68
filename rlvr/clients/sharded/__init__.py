"""`client=sharded`: one policy trained by several processes (ranks), each with a part of every weight.

`sharded_client` is the client, in the driver's process. `data_split` cuts the data over the ranks, `rank_group` sends
them one command at a time, `rank_processes` starts them on this machine, `rank_worker` is what each of them runs.
`docs/many-processes.md` says how to use it.
"""
