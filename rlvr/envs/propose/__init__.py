"""A policy that writes tasks and solves them: a proposer and a solver, whose tasks code checks and answers."""
