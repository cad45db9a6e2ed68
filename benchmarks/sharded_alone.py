"""The process that `benchmarks.sharded_memory` compares with: the same commands to a learner without shards."""

from benchmarks.sharded_memory import AloneWorker
from rlvr.clients.sharded.rank_worker import run_rank

if __name__ == "__main__":
    run_rank(AloneWorker())
