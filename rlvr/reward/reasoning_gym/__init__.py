"""Scores answers to the tasks of the library `reasoning_gym`, whose scorers evaluate what a model wrote.

`gym_reward` is the reward, `answer_grammar` what an answer must look like before a scorer that evaluates sees it,
`library_workers` and `library_job` run the library in a guarded process: our own never imports it.
"""
