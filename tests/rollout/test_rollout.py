"""Episodes in lockstep, token ids end to end, scores onto rewards."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.clients.local import LocalSamplingClient
from rlvr.clients.mock.mock_client import MockSamplingClient, ScriptedSamplingClient, TablePolicy, WordTokenizer
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import StepResult
from rlvr.core.types import Outcome, StopReason, Task
from rlvr.envs import PromptEnv
from rlvr.reward import resolve_reward
from rlvr.rollout import Group, rollout, score

WORDS = WordTokenizer(["a", "b", "c", "feedback", "prompt"])
A, B, C, FEEDBACK, PROMPT = (WORDS.ids[w] for w in ("a", "b", "c", "feedback", "prompt"))


class TwoTurns:
    """Answers the first action with `feedback`, appended to the history or (rewrite) in place of it."""

    def __init__(self, rewrite: bool) -> None:
        self.rewrite, self.turn = rewrite, 0

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput([PROMPT]), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(reward=1.0, episode_done=True)
        seen = [PROMPT, FEEDBACK] if self.rewrite else [PROMPT, *action, FEEDBACK]
        return StepResult(reward=0.25, episode_done=False, next_observation=ModelInput(seen))


def play(env: Any, *answers: list[int]):
    script = iter(answers)
    sampler = ScriptedSamplingClient(WORDS, lambda i: next(script))
    group = Group("g", Task("t", "prompt"), [env])
    return rollout([group], sampler, SamplingParams(max_tokens=4), seed=1), sampler


def test_a_growing_history_is_one_trajectory_with_a_mask_of_policy_tokens() -> None:
    """Environment tokens carry mask 0 and log-prob 0; rewards of the turns add up."""
    [t], sampler = play(TwoTurns(rewrite=False), [A, 0], [B, C, 0])
    assert t.prompt_tokens == [PROMPT]
    assert t.response_tokens == [A, 0, FEEDBACK, B, C, 0]
    assert t.action_mask == [1, 1, 0, 1, 1, 1]
    assert (t.response, t.answer) == ("a <end> feedback b c", "b c")  # verifiers judge what the policy said last
    assert t.reward == 1.25
    assert sampler.prompts == [[PROMPT], [PROMPT, A, 0, FEEDBACK]]


def test_a_rewritten_history_gives_a_second_trajectory_of_the_same_rollout() -> None:
    """Both share the rollout id, so that a baseline counts them once."""
    first, second = play(TwoTurns(rewrite=True), [A, 0], [B, 0])[0]
    assert first.rollout_id == second.rollout_id == "g/0"
    assert (first.response_tokens, second.prompt_tokens, second.response_tokens) == ([A, 0], [PROMPT, FEEDBACK], [B, 0])


def test_a_scored_rollout_shares_its_verdict_with_its_earlier_trajectories() -> None:
    trajectories = play(TwoTurns(rewrite=True), [A, 0], [B, 0])[0]
    trajectories = [t for t in trajectories]
    for t in trajectories:
        t.task = Task("t", "prompt", {"answer": "b"})
    score(trajectories, resolve_reward("exact_match").plus_environment(1.0))
    assert [t.reward for t in trajectories] == [2.25, 2.25]  # 0.25 + 1.0 from the turns, 1.0 from the verifier
    assert all(t.reward_parts == {"exact_match": [1.0, 1.0], "environment": [1.0, 1.25]} for t in trajectories)


def test_a_composite_leaves_its_rewards_and_weights_in_the_trajectory() -> None:
    """Two of a name, one of weight 0 that does not count: the reward is the sum of weight x value."""
    sampler = ScriptedSamplingClient(WORDS, lambda i: [A, 0])
    t, other = rollout([group_of(2)], sampler, SamplingParams(max_tokens=2), seed=1)
    t.task = other.task = Task("t", "prompt", {"answer": "b"})
    rewards: list[dict[str, Any]] = [
        {"name": "exact_match", "weight": 3.0},
        {"name": "keyword_contains", "weight": 1.0, "kwargs": {"keywords": ["a"]}},
        {"name": "exact_match", "weight": 0.0},
    ]
    score([t], resolve_reward("composite", rewards=rewards))
    assert t.reward_parts == {"exact_match": [0.75, 0.0], "keyword_contains": [0.25, 1.0]} and t.reward == 0.25
    score([other], resolve_reward("exact_match"))
    assert other.reward_parts == {}


def test_only_the_end_token_is_hidden_from_verifiers() -> None:
    """A special token inside the answer stays visible: dropping it would make a malformed answer look well formed."""
    group = Group("g", Task("t", "prompt"), [PromptEnv(Task("t", "prompt"), WORDS)])
    sampler = ScriptedSamplingClient(WORDS, lambda i: [A, 1, B, 0])
    [t] = rollout([group], sampler, SamplingParams(max_tokens=8), seed=1)
    assert t.response == "a <unk> b"
    sampler = ScriptedSamplingClient(WORDS, lambda i: [A, 0, B, C])
    [t] = rollout([group_of(1)], sampler, SamplingParams(max_tokens=3), seed=1)
    assert (t.response, t.stop_reason, t.truncated) == ("a <end> b", StopReason.LENGTH, True)


def group_of(size: int, name: str = "g") -> Group:
    task = Task("t", "prompt")
    return Group(name, task, [PromptEnv(task, WORDS) for _ in range(size)])


def test_draws_depend_on_the_group_and_sample_and_not_on_the_company() -> None:
    """The same group gives the same answers alone, with others, and in another order."""
    sampler = MockSamplingClient(TablePolicy(["a", "b", "c"]))
    params = SamplingParams(max_tokens=6)
    alone = rollout([group_of(4, "x")], sampler, params, seed=9)
    company = rollout([group_of(2, "y"), group_of(4, "x")], sampler, params, seed=9)[2:]
    assert [t.response_tokens for t in alone] == [t.response_tokens for t in company]
    other = rollout([group_of(4, "x")], sampler, params, seed=10)
    assert [t.response_tokens for t in alone] != [t.response_tokens for t in other]
    assert len({tuple(t.response_tokens) for t in alone}) > 1


def test_a_verifier_error_leaves_no_reward_and_is_no_zero() -> None:
    def broken(prompt: str, response: str, meta: Any = None) -> float:
        raise RuntimeError("no verdict today")

    trajectories = play(TwoTurns(rewrite=True), [A, 0], [B, 0])[0]
    score(trajectories, resolve_reward(broken))
    assert [t.reward for t in trajectories] == [None, None]
    [verdict] = trajectories[-1].scores.values()
    assert verdict.outcome is Outcome.ERROR
    assert "no verdict today" in verdict.detail


def test_the_training_projection_shifts_everything_alike() -> None:
    """Inputs all but last, targets all but first; advantage only where the policy acted, times the weight."""
    [t], _ = play(TwoTurns(rewrite=False), [A, 0], [B, 0])
    t.logprobs = [-0.1, -0.2, 0.0, -0.3, -0.4]
    t.advantage = 2.0
    d = Datum.from_trajectory(t, weight=0.5)
    assert d.model_input.tokens == [PROMPT, A, 0, FEEDBACK, B]
    assert d.loss_fn_inputs["target_tokens"].tolist() == [A, 0, FEEDBACK, B, 0]
    assert d.loss_fn_inputs["advantages"].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert d.loss_fn_inputs["logprobs"].tolist() == pytest.approx([-0.1, -0.2, 0.0, -0.3, -0.4])


def test_every_end_token_of_the_model_is_hidden_and_no_other(fresh) -> None:
    """A model may have several end tokens (`generation_config`): whichever ended the answer is not part of its text."""
    engine = fresh("qwen3")
    tokenizer = engine.model.tokenizer
    other_end = tokenizer.encode("7", add_special_tokens=False)[0]
    engine.model.module.generation_config.eos_token_id = [tokenizer.eos_token_id, other_end]
    sampler = LocalSamplingClient(engine, engine.create_policy("p").snapshot())
    task = Task("t", "1 + 2 =")
    group = Group("g", task, [PromptEnv(task, tokenizer) for _ in range(64)])
    trajectories = rollout([group], sampler, SamplingParams(max_tokens=12), seed=3)
    by_other = [t for t in trajectories if t.stop_reason is StopReason.STOP and t.response_tokens[-1] == other_end]
    assert by_other and all("7" not in t.response.split() for t in by_other)


def test_answers_without_logprobs_are_judged_and_refuse_to_train() -> None:
    class Silent(ScriptedSamplingClient):
        def sample(self, *args: Any) -> Any:
            response = super().sample(*args).result()
            silent = [SampledSequence(s.stop_reason, s.tokens) for s in response.sequences]
            return LazyFuture.from_value(SampleResponse(silent, fingerprint="text only"))

    sampler = Silent(WORDS, lambda i: [A, 0])
    [t] = rollout([group_of(1)], sampler, SamplingParams(max_tokens=8), seed=1)
    assert t.response == "a" and t.logprobs == []
    with pytest.raises(ValueError, match="no sampling log-probs"):
        t.require_trainable()
