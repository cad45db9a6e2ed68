"""Environment `propose`: the policy writes tasks of another environment and solves them.

env: {name: propose, kwargs: {inner: rpn_arithmetic, answers: 8}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs.propose.proposals import PAYS, ProposableSource, Proposals
from rlvr.envs.propose.propose_env import ROLES, ProposeEnv, ProposeGroup, ProposeRules
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.registry import resolve_reward
from rlvr.reward.reward_options import check_choice, check_integer, check_number

EXAMPLE = "{example}"
_EXAMPLES = "examples"  # the key of a task's meta: the ids of the tasks that the proposer is shown
_TRIES = 100  # draws in a row that are examples of the prompt: there is nothing else to propose


@register_environment("propose")
class ProposeSource(NestedSource):
    """A proposer writes a task of the environment `inner`, and a solver answers it `answers` times: the same policy.

    `instruction` is what the proposer reads; each `{example}` in it becomes the prompt of a drawn training task. A
    proposal counts if `inner` can parse it, and if it is of its levels, not held out, no example, and not proposed
    before in its group. The solver gets 1 for each right answer and else 0, as the reward of `inner` judges it. With m
    the share of right answers the proposer gets `proposer_weight` times `learnability` (0 if m is 0 or 1, else 1 - m),
    `uncertainty` (1 - 2 |m - 1/2|) or `random` (0 or 1 whatever m is), as `proposer_reward` says, and for a refused
    proposal `proposer_weight` times `refused_reward`. Held-out tasks are those of `inner`, each asked once. Of the
    demonstrations the share `proposal_share` are drawn tasks as proposals, the others those of `inner`.
    """

    reward = "environment"
    levels: tuple[str, ...] = ("",)
    roles, writes_tasks = ROLES, True
    owns_prompts = True
    size = leave_out = None

    def __init__(
        self,
        inner: str | TaskSource = "rpn_arithmetic",
        inner_kwargs: Mapping[str, Any] | None = None,
        answers: int = 8,
        proposer_reward: str = "learnability",
        proposer_weight: float = 1.0,
        refused_reward: float = -0.5,
        instruction: str = "<propose> {example}",
        proposal_share: float = 0.2,
    ) -> None:
        check_integer("propose: answers", answers, 2, 1000)
        check_choice("propose: proposer_reward", proposer_reward, list(PAYS))
        check_number("propose: proposer_weight", proposer_weight, 0, above=True)
        check_number("propose: refused_reward", refused_reward, -100, 0)
        check_number("propose: proposal_share", proposal_share, 0, 1)
        if not isinstance(instruction, str) or not instruction.strip():
            raise ValueError(
                f"propose: instruction={instruction!r:.80}, expected a text, such as '<propose> {EXAMPLE}'"
            )
        super().__init__("propose", inner, inner_kwargs)
        if not isinstance(inner_source := self.inner, ProposableSource):
            raise ValueError(
                f"propose: tasks of the environment {inner!r:.80} cannot be proposed, since it has no is_heldout(id) "
                "and no parse_task(text), which a proposal is checked by; use rpn_arithmetic, or add them"
            )
        self._proposable: ProposableSource = inner_source
        self._verifier = resolve_reward(self.inner.reward)
        if self._verifier.waits_for:
            raise ValueError(
                f"propose: the reward {self.inner.reward!r} of {inner!r:.80} waits for {self._verifier.waits_for}; "
                "use an environment whose answers are judged in this process"
            )
        self._rules = ProposeRules(answers, PAYS[proposer_reward], proposer_weight, refused_reward, self.inner.levels)
        self._instruction, self._proposal_share = instruction, proposal_share
        self.max_turns = 1 + answers
        self.group_builder = self._open_group

    @cached_property
    def vocabulary(self) -> list[str] | None:
        """The words of the inner environment, and those of the instruction."""
        words = self.inner.vocabulary
        own = self._instruction.replace(EXAMPLE, " ").split()
        return None if words is None else list(dict.fromkeys([*words, *own]))

    def train(self, seed: int, index: int, level: str) -> Task:
        draw = rng.key("propose", seed, index)
        shown = [self._draw(rng.key(draw, place)) for place in range(self._instruction.count(EXAMPLE))]
        texts = iter(task.prompt_text for task in shown)
        prompt = re.sub(re.escape(EXAMPLE), lambda _: next(texts), self._instruction)
        meta = {"game": "propose", "draw": draw, _EXAMPLES: [task.id for task in shown]}
        return Task(f"propose-{seed}-{index}", prompt, meta)

    def heldout(self, count: int | None) -> list[Task]:
        return self.inner.heldout(count)

    def env(self, task: Task, tokenizer: Any) -> ProposeEnv:  # type: ignore[override]
        return self._open(task, tokenizer, 0, self._collect_proposals(task))

    def _open_group(self, task: Task, tokenizer: Any, size: int) -> ProposeGroup:
        super().env(task, tokenizer)
        return ProposeGroup(
            lambda number, proposals: self._open(task, tokenizer, number, proposals),
            size,
            self._collect_proposals(task),
        )

    def _open(self, task: Task, tokenizer: Any, number: int, proposals: Proposals | None) -> ProposeEnv:
        return ProposeEnv(task, tokenizer, self._verifier, self._rules, proposals, number)

    def _collect_proposals(self, task: Task) -> Proposals | None:
        """What collects the proposals of a group; None for a task that is only to be solved."""
        return Proposals(self._proposable, task.meta[_EXAMPLES]) if _EXAMPLES in task.meta else None

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        """A task to imitate: of those to propose in, the share 1 - `proposal_share` become tasks to solve."""
        if _EXAMPLES not in task.meta:
            return self.inner.complete_prompt(task, tokenizer)
        draw = task.meta["draw"]
        if rng.uniform(rng.key("demonstrated role", draw)) < self._proposal_share:
            return task
        return self.inner.complete_prompt(self._draw(rng.key("solved", draw)), tokenizer)

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        if _EXAMPLES not in task.meta:
            return self.inner.demonstration(task, key)
        for attempt in range(_TRIES):
            drawn = self._draw(rng.key("proposed", task.meta["draw"], key, attempt))
            if drawn.id not in task.meta[_EXAMPLES]:
                return drawn.prompt_text
        return None

    def describe_task(self, task: Task) -> Mapping[str, str]:
        return {} if _EXAMPLES in task.meta else self.inner.describe_task(task)

    def _draw(self, key: int) -> Task:
        """A training task of the inner environment; all levels are as likely."""
        levels = self.inner.levels
        return self.inner.train(key, 0, levels[rng.integer(len(levels), key)])
