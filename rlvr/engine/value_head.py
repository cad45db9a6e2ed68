"""Critics: policies with a value head instead of the language model's.

The value of a place is the product of the last hidden state with one vector, in fp32. A critic of an adapter is a
second adapter of the same base; one of all weights is a second model, in an engine of its own. Both begin with the
policy's weights and a zero-initialised value head, so V = 0 at the start.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from rlvr.engine.engine import Engine
from rlvr.engine.model import LanguageModel
from rlvr.engine.policy import VALUE_HEAD, Policy


def create_critic(engine: Engine, policy: Policy) -> tuple[Engine, Policy]:
    """A new critic that begins with the weights of `policy` as they are now, and the engine that computes it."""
    name = f"{policy.name}-critic"
    with engine.lock:
        if policy.lora is None:
            engine = Engine(replace(engine.model, module=copy.deepcopy(engine.model.module)), engine.limits)
            critic = engine.create_policy(name)
        else:
            critic = engine.create_policy(name, lora=policy.lora)
            with torch.no_grad():
                for key, p in policy.parameters.items():
                    critic.parameters[key].copy_(p)
        add_value_head(critic, engine.model)
    return engine, critic


def add_value_head(policy: Policy, model: LanguageModel) -> None:
    """Make a policy that was not trained yet a critic, with a zero-initialised value head."""
    policy.__dict__.pop("masters", None)  # made anew, with the head
    width = model.module.config.get_text_config().hidden_size
    policy.parameters[VALUE_HEAD] = nn.Parameter(torch.zeros(1, width, device=model.device))
