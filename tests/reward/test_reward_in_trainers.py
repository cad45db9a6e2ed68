"""Our rewards inside TRL's GRPOTrainer, the real one on a tiny model, and as verl's compute_score."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest

from rlvr.core.types import Outcome
from rlvr.reward import NoRewardError, Reward, resolve_reward
from rlvr.reward.signatures import Case

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
trl_warns = pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Two steps of GRPO by TRL on the CPU: a function from reward functions and rows to the trainer after it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(["def add(a, b): return a + b", "What is 2 + 2? Answer: 4"], letters)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip

    def run(rewards: list[Any], rows: list[dict[str, Any]], **more: Any) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        settings = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), max_steps=2, per_device_train_batch_size=4,
            num_generations=4, max_completion_length=8, learning_rate=1e-3, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1, bf16=False, **more,
        )  # fmt: skip
        trainer = GRPOTrainer(
            Qwen3ForCausalLM(config), reward_funcs=rewards, args=settings, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        return trainer

    return run


@pytest.mark.slow
@needs_trl
@trl_warns
def test_gsm8k_and_a_form_reward_train_in_trl_unchanged(train: Callable[..., Any]) -> None:
    """GSM8K's own columns, chat prompts; both rewards appear under their names, and the policy moves."""
    rows = [{"prompt": CHAT, "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, {"prompt": CHAT, "answer": "#### 1,234"}] * 4
    trainer = train([resolve_reward("gsm8k"), resolve_reward("length_penalty", target_length=3)], rows)
    steps = [log for log in trainer.state.log_history if "reward" in log]
    assert len(steps) == 2
    for log in steps:
        assert log["rewards/gsm8k/mean"] == 0.0  # random text holds no answer
        assert 0 < log["rewards/length_penalty/mean"] <= 1.0
        assert log["rewards/gsm8k/error_rate"] == log["rewards/gsm8k/invalid_rate"] == 0.0
    assert any(log["grad_norm"] > 0 for log in steps)


@pytest.mark.slow
@needs_trl
@trl_warns
@pytest.mark.filterwarnings("ignore:reward 'trainers_broken' could not judge:RuntimeWarning")
def test_in_trl_an_unjudged_answer_has_no_gradient(train: Callable[..., Any]) -> None:
    """Every other answer is an error: it is in no mean, its share is logged, and training goes on with the rest."""
    calls = iter(range(1000))

    def trainers_broken(prompt: str, response: str, meta: Any = None) -> float:
        if next(calls) % 2:
            raise RuntimeError("the verifier broke")
        return 5.0

    rows = [{"prompt": "2 + 2 =", "answer": "4"}] * 8
    trainer = train([resolve_reward(trainers_broken)], rows)
    for log in [log for log in trainer.state.log_history if "reward" in log]:
        assert log["rewards/trainers_broken/mean"] == log["reward"] == 5.0
        assert log["rewards/trainers_broken/error_rate"] == 0.5 and log["grad_norm"] == 0.0


@needs_trl
@trl_warns
def test_code_runs_in_trl_with_the_tests_among_the_columns(train: Callable[..., Any]) -> None:
    rows = [
        {"prompt": "Write add(a, b).", "text": "Write add(a, b).", "test_list": ["assert add(1, 2) == 3"]},
        {"prompt": "Write half(n).", "text": "Write half(n).", "test_list": ["assert half(4) == 2"]},
    ] * 4
    trainer = train([resolve_reward("code")], rows)
    for log in [log for log in trainer.state.log_history if "reward" in log]:
        assert log["rewards/code/mean"] == -0.5  # random text does not even parse, or defines nothing
        assert log["rewards/code/error_rate"] == log["rewards/code/invalid_rate"] == 0.0


def test_columns_chats_and_token_ids_reach_the_reward() -> None:
    """Text prompts and messages; of a chat with tools the assistant's last message; columns row by row."""
    seen: list[Case] = []

    def trainers_seen(case: Case) -> float:
        assert case.meta is not None and case.trajectory is None
        seen.append(case)
        return float(case.meta["answer"] == case.response)

    reward = resolve_reward(trainers_seen)
    chat = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": [{"type": "text", "text": "it "}, {"type": "text", "text": "is 4"}]},
        {"role": "tool", "content": "5"},
    ]
    values = reward(
        prompts=["2 + 2 =", CHAT, CHAT], completions=["4", chat, chat[:2]], completion_ids=[[7], [8, 9], []],
        answer=["4", "it is 4", "4"], trainer_state=None, log_extra=None, log_metric=None,
    )  # fmt: skip
    assert values == [1.0, 1.0, 0.0]
    assert [t.response for t in seen] == ["4", "it is 4", ""]
    assert [t.tokens for t in seen] == [[7], [8, 9], []]
    assert [t.messages for t in seen] == [None, CHAT, CHAT]
    assert [t.prompt for t in seen] == ["2 + 2 =", "user: What is 2 + 2?", "user: What is 2 + 2?"]
    assert reward(prompts=["p"], completions=["4"], answer=["4"]) == [1.0]
    assert reward.as_trl()(prompts=["p"], completions=["4"], answer=["5"]) == [0.0]
    assert reward.as_trl().__name__ == "trainers_seen" == reward.__name__


def test_a_users_trl_function_gets_messages_through_a_reward() -> None:
    def trainers_own(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        assert prompts == [CHAT]
        return [float(completions[0][-1]["content"] == answer[0])]

    done = [{"role": "assistant", "content": "4"}]
    assert resolve_reward(trainers_own)(prompts=[CHAT], completions=[done], answer=["4"]) == [1.0]


def test_trl_gets_rates_and_warnings_of_unjudged_answers() -> None:
    metrics: dict[str, float] = {}
    extra: dict[str, list[str]] = {}
    given = {
        "prompts": ["a", "b", "c", "d"], "completions": ["#### 4", "#### 5", "4", "no"],
        "answer": ["#### 4", "#### 4", "none", "4"], "log_metric": metrics.__setitem__, "log_extra": extra.__setitem__,
    }  # fmt: skip
    reward = resolve_reward("gsm8k")
    assert reward(**given) == [1.0, 0.0, None, 0.0] and reward.__name__ == "gsm8k"
    assert metrics == {
        "rewards/gsm8k/pass_rate": 0.25,
        "rewards/gsm8k/error_rate": 0,
        "rewards/gsm8k/invalid_rate": 0.25,
    }
    assert extra == {"gsm8k/reason": ["passed", "wrong_value", "no_gold", "no_answer"]}

    def trainers_raises(prompt: str, response: str) -> float:
        raise KeyError("boom")

    with pytest.warns(RuntimeWarning, match=r"could not judge 1 of 1 answers.*None instead.*KeyError: 'boom'"):
        assert resolve_reward(trainers_raises)(prompts=["a"], completions=["b"]) == [None]


def test_an_argument_of_trl_that_is_not_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mode='all', expected a list with one entry for each of the 2 completions"):
        resolve_reward("gsm8k")(prompts=["p"] * 2, completions=["c"] * 2, mode="all")
    with pytest.raises(ValueError, match="answer="):
        resolve_reward("gsm8k")(prompts=["p"] * 2, completions=["c"] * 2, answer=["4"])


def test_an_answer_of_a_wrong_type_is_refused_in_both_trainers() -> None:
    reward = resolve_reward("gsm8k")
    with pytest.raises(ValueError, match=r"completions\[1\]=None is of type NoneType; expected the answer as text"):
        reward(prompts=["p"] * 2, completions=["4", None], answer=["4"] * 2)
    with pytest.raises(ValueError, match="completions='4', expected a list"):
        reward(prompts=["p"], completions="4", answer=["4"])
    with pytest.raises(ValueError, match=r"prompts=.*one entry for each of the 1 completions"):
        reward(prompts=["p"] * 2, completions=["4"], answer=["4"])
    with pytest.raises(ValueError, match="solution_str=4 is of type int; expected the answer as text"):
        reward(data_source="d", solution_str=4, ground_truth="4")
    with pytest.raises(ValueError, match=r"extra_info=.* is of type list; expected a dictionary"):
        reward(data_source="d", solution_str="4", ground_truth="4", extra_info=["question"])


def test_a_reward_is_verls_compute_score() -> None:
    """As verl's managers call it; the same keys for every answer, as those of the first are taken for all."""
    reward: Reward = resolve_reward("gsm8k")
    right = reward(
        data_source="openai/gsm8k", solution_str="so #### 1,234", ground_truth="1234",
        extra_info={"index": 3, "num_turns": None}, reward_router_address=None,
    )  # fmt: skip
    wrong = reward(data_source="openai/gsm8k", solution_str="so", ground_truth="1234", extra_info=None)
    assert reward.as_verl()(data_source="x", solution_str="so", ground_truth="1234", reward_router_address=None) == {
        "score": 0.0,
        "acc": 0.0,
        "outcome": "failed",
        "reason": "no_answer",
    }
    assert right == {"score": 1.0, "acc": 1.0, "outcome": "passed", "reason": ""}
    assert wrong == {"score": 0.0, "acc": 0.0, "outcome": "failed", "reason": "no_answer"}


def test_verls_columns_become_the_tasks_meta() -> None:
    seen: list[Any] = []

    def trainers_meta(prompt: str, response: str, meta: dict[str, Any]) -> float:
        seen.append((prompt, meta))
        return 1.0

    reward = resolve_reward(trainers_meta)
    reward(data_source="own", solution_str="s", ground_truth="4", extra_info={"question": "2 + 2?", "split": "train"})
    reward(data_source="own", solution_str="s", ground_truth={"test_list": ["assert f()"]})
    assert seen[0] == (
        "2 + 2?",
        {"question": "2 + 2?", "split": "train", "data_source": "own", "ground_truth": "4", "answer": "4"},
    )
    assert seen[1][1]["test_list"] == ["assert f()"]

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float((data_source, ground_truth, extra_info["split"]) == ("own", "4", "train"))

    own = resolve_reward(compute_score)
    assert own(data_source="own", solution_str="4", ground_truth="4", extra_info={"split": "train"})["score"] == 1.0


def test_verl_raises_for_an_unjudged_answer() -> None:
    with pytest.raises(
        NoRewardError, match=r"'gsm8k' cannot judge this answer: invalid \(no_gold\): .*NoRewardError"
    ) as caught:
        resolve_reward("gsm8k")(data_source="x", solution_str="#### 4", ground_truth="none")
    assert caught.value.score.outcome is Outcome.INVALID
    with pytest.raises(ValueError, match=r"called as verl does, does not take 'mode'; .* resolve_reward\('gsm8k'"):
        resolve_reward("gsm8k")(data_source="x", solution_str="4", ground_truth="4", mode="all")


DOUBLE, SAME = "def double(n):\n    return 2 * n", "def double(n):\n    return n"
CALLED = {"inputs": [[2]], "outputs": [4], "fn_name": "double"}
ROW = {"test_list": ["assert double(2) == 4", "assert double(0) == 0"]}
STREAM = json.dumps({"inputs": ["2\n", "3\n"], "outputs": ["4\n", "6\n"]})


@pytest.mark.parametrize(
    ("truth", "program", "value"),
    [
        (ROW, DOUBLE, 1.0), (ROW, SAME, 0.25), (CALLED, DOUBLE, 1.0), (CALLED, SAME, -0.5),
        (json.dumps(CALLED), DOUBLE, 1.0), (STREAM, "print(2 * int(input()))", 1.0), (STREAM, "print(4)", 0.25),
    ],
)  # fmt: skip
def test_verls_code_data_is_judged_by_its_tests(truth: Any, program: str, value: float) -> None:
    """As verl's own data sets keep them (inputs and outputs, as JSON or not), or as whatever row `code` knows."""
    got = resolve_reward("code")(data_source="own", solution_str=program, ground_truth=truth, extra_info={"index": 1})
    assert (got["score"], got["acc"]) == (value, float(value == 1.0)), got


def test_in_trl_tests_are_a_column() -> None:
    given = {"prompts": ["Double n."] * 2, "completions": [DOUBLE, SAME], "completion_ids": [[1], [2]]}
    assert resolve_reward("code")(**given, test_list=[ROW["test_list"]] * 2, task_id=[1, 1]) == [1.0, 0.25]
