"""The engine: tokens in, tokens and gradients out. It knows nothing of rewards, tasks or text. torch lives here.

Importing it, before torch, settles how torch's threads wait (`rlvr.cores`).
"""

from rlvr.cores import quiet_threads

quiet_threads()
