"""The engine: tokens in, tokens and gradients out. It knows nothing of rewards, tasks or text. torch lives here.

Importing it, before torch, settles how torch's threads wait (`rlvr.core.cpu_budget`).
"""

from rlvr.core.cpu_budget import limit_spinning

limit_spinning()
