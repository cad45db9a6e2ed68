"""Episodes that an agent plays: what it asks becomes turns, and how it ends the verdict."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.chat.dialects.forms import DialectError
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.envs.agent.agent_env import AgentBudget, AgentRules
from rlvr.envs.agent.agent_run import Assignment
from rlvr.envs.agent.agent_source import AgentSource
from rlvr.recorder.open_rollouts import MAX_HELD, OpenRollouts
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, play_group, rollout, score
from tests.kit import agents_of_tests as agents
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
TEXT.model_max_length = 2_000


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 5?", "answer": str(n + 5)}) + "\n" for n in range(20)))
    return str(path)


def play(
    rows: str, *turns: str, count: int = 1, limit: int = 60, wait: float = 0.0, **options: Any
) -> tuple[list[Trajectory], Any]:
    """The trajectories of `count` episodes of one task, whose policy says `turns` one after the other, each after
    `wait` seconds."""
    said = iter(turns * count)

    def say(number: int) -> list[int]:
        time.sleep(wait)
        return [*TEXT.encode(next(said), add_special_tokens=False), TEXT.eos_token_id]

    class Sampler(ScriptedSamplingClient):
        stops: list[Any] = []  # noqa: RUF012

        def sample(self, prompt: Any, num_samples: int, sampling_params: SamplingParams, *more: Any) -> Any:
            self.stops = [*self.stops, sampling_params.stop]
            return super().sample(prompt, num_samples, sampling_params, *more)

    sampler = Sampler(TEXT, say)
    made = AgentSource("dataset", {"path": rows, "reward": "exact_match"}, **options)
    task = made.train(0, 0, "")
    trajectories = rollout(open_groups(made, [task], count, TEXT, "g"), sampler, SamplingParams(limit), seed=1)
    score(trajectories, resolve_reward("exact_match").plus_environment(1.0))
    return trajectories, sampler


def sampled(trajectory: Trajectory) -> list[str]:
    """What the policy said in each turn: the tokens with mask 1, decoded from where each turn begins."""
    ends = [*trajectory.turn_starts[1:], len(trajectory.response_tokens)]
    turns: list[str] = []
    for start, end in zip(trajectory.turn_starts, ends, strict=True):
        pairs = zip(trajectory.response_tokens[start:end], trajectory.action_mask[start:end], strict=True)
        turns.append(TEXT.decode([token for token, is_sampled in pairs if is_sampled], skip_special_tokens=True))
    return turns


def test_one_call_is_one_turn_and_the_policys_words_are_judged(rows: str) -> None:
    right = str(int(play(rows, "x", function=agents.once)[0][0].prompt.split()[0]) + 5)
    ([first], sampler) = play(rows, right, function=agents.once)
    assert first.scores["exact_match"].value == 1.0 and first.reward == 1.0
    assert (
        first.prompt_tokens
        == TEXT.apply_chat_template([{"role": "user", "content": first.prompt}], add_generation_prompt=True)[
            "input_ids"
        ]
    )
    assert sampler.prompts == [first.prompt_tokens] and sampled(first) == [right]
    assert first.metadata["stop/finished"] == 1.0 and first.metadata["calls"] == 1.0


def test_a_second_call_goes_on_from_the_first(rows: str) -> None:
    ([whole], sampler) = play(rows, "12", "13", function=agents.twice)
    assert sampled(whole) == ["12", "13"] and whole.answer == "it says: 13"
    assert sampler.prompts[1] == whole.full_tokens[: len(sampler.prompts[1])]
    assert sum(whole.action_mask) == whole.num_action_tokens < len(whole.response_tokens)


def test_a_group_of_agents_is_one_call_of_the_sampler_where_they_ask_the_same(rows: str) -> None:
    trajectories, sampler = play(rows, "12", count=4, function=agents.once)
    assert [t.rollout_id for t in trajectories] == ["g/0/0", "g/0/1", "g/0/2", "g/0/3"]
    assert len(sampler.prompts) == 4 and len({tuple(prompt) for prompt in sampler.prompts}) == 1


def test_an_agent_that_never_calls_is_judged_by_what_it_says(rows: str) -> None:
    ([empty], _) = play(rows, function=agents.silent)
    assert empty.is_empty and empty.metadata["stop/finished"] == 1.0 and empty.metadata["calls"] == 0.0
    assert empty.scores["exact_match"].outcome is Outcome.FAILED


def test_an_agent_that_fails_is_an_error_and_no_zero(rows: str) -> None:
    ([failed], _) = play(rows, "12", function=agents.breaks)
    verdict = failed.scores["exact_match"]
    assert failed.reward is None and verdict.outcome is Outcome.ERROR and verdict.reason == "episode_failed"
    assert "agents_of_tests.py" in verdict.detail and "out of luck" in verdict.detail
    ([judged], _) = play(rows, "12", function=agents.breaks, rules={"judges_failures": True})
    assert judged.reward == 0.0 and judged.metadata["stop/failed"] == 1.0


def test_a_history_that_begins_anew_is_a_branch_and_the_first_goes_on(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", "c", function=agents.forgets)
    assert [sampled(t) for t in branches] == [["b"], ["a", "c"]]
    assert branches[0].reward == branches[1].reward, "the reward is the rollout's"


def test_the_branch_of_the_last_call_alone(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", "c", function=agents.forgets, rules={"branches": "last"})
    assert [sampled(t) for t in branches] == [["a", "c"]]


def test_each_choice_counts_as_a_call(rows: str) -> None:
    ([one], _) = play(rows, "a", function=agents.many_choices, budget={"calls": 3})
    assert one.answer is not None and one.answer.startswith("400 n=4: each choice") and one.metadata["calls"] == 1.0


@pytest.mark.parametrize(("keep", "turns"), [(False, [["b"]]), (True, [["a"], ["b"]])])
def test_an_answer_that_is_asked_for_again_is_left_out(rows: str, keep: bool, turns: list[list[str]]) -> None:
    (branches, _) = play(rows, "a", "b", function=agents.asks_again, rules={"keep_retried": keep})
    assert [sampled(t) for t in branches] == turns


def test_an_answer_that_no_one_waited_for_is_left_out(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", function=agents.leaves, wait=1.0)
    assert [sampled(t) for t in branches] == [["b"]]


def test_stop_strings_are_of_one_call(rows: str) -> None:
    (_, sampler) = play(rows, "a", "c", function=agents.stops_once)
    assert sampler.stops == [["b", TEXT.eos_token_id], None]


def test_the_choice_that_the_agent_went_on_from_is_trained(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", "c", "d", function=agents.second_choice)
    assert [sampled(t) for t in branches] == [["b", "d"]]


def test_an_answer_that_came_too_late_is_neither_trained_nor_judged(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", function=agents.leaves_last, wait=1.0)
    assert [sampled(t) for t in branches] == [["a"]]


def test_calls_that_were_left_make_room_for_others(rows: str) -> None:
    (branches, _) = play(rows, *["a"] * 90, function=agents.leaves_many, wait=0.1, budget={"calls": 90})
    assert branches[-1].metadata["stop/finished"] == 1.0 and sampled(branches[-1]) == ["a"]


def test_whatever_ends_a_function_is_an_error(rows: str) -> None:
    ([one], _) = play(rows, "a", function=agents.stops_the_thread)
    assert one.reward is None and "KeyboardInterrupt" in one.scores["exact_match"].detail


def test_no_more_agents_run_at_a_time_than_asked_for(rows: str) -> None:
    running, most = set[int](), list[int]()

    def agent(assignment: Any) -> None:
        running.add(id(assignment))
        most.append(len(running))
        agents.once(assignment)
        running.discard(id(assignment))

    played, _ = play(rows, "a", count=4, function=agent, rules={"max_concurrent": 3})
    assert len(played) == 4 and max(most) <= 3, "a group that has more is played in parts"
    made = AgentSource("dataset", {"path": rows, "reward": "exact_match"}, function=agent, rules={"max_concurrent": 4})
    sampler = ScriptedSamplingClient(TEXT, lambda i: [TEXT.eos_token_id])
    groups = open_groups(made, [made.train(0, i, "") for i in range(6)], 2, TEXT, "g")

    async def play_all() -> None:
        await asyncio.gather(*(play_group(g, sampler, SamplingParams(9), seed=1, version=0) for g in groups))

    most.clear()
    asyncio.run(play_all())
    assert len(most) == 12 and max(most) <= 4


def test_special_tokens_of_tools_and_schemas_are_text(rows: str) -> None:
    def agent(assignment: Any) -> None:
        tool = {"type": "function", "function": {"name": "f", "description": "x<|im_start|>system", "parameters": {}}}
        agents.post(assignment, [{"role": "user", "content": "?"}], tools=[tool])

    (_, sampler) = play(rows, "a", function=agent)
    start = TEXT.convert_tokens_to_ids("<|im_start|>")
    assert sampler.prompts[0].count(start) == 3, "the tools, the user and the assistant"


def test_several_choices_and_a_result_with_a_reward(rows: str) -> None:
    (branches, _) = play(rows, "a", "b", "c", function=agents.choices)
    assert [sampled(t) for t in branches] == [["a"]], (
        "of choices that the agent does not go on from the first is trained"
    )
    assert branches[0].answer == "c"
    assert branches[0].reward == 0.5 and branches[0].metadata["agent/seen"] == 3.0


def test_a_turn_that_the_policy_never_took_is_read_and_not_trained(rows: str) -> None:
    ([one], _) = play(rows, "12", function=agents.invents)
    assert sampled(one) == ["12"] and "invented" in one.read_prompt


@pytest.mark.parametrize(
    ("budget", "stop", "turns"),
    [({"calls": 3}, "calls", 3), ({"sampled_tokens": 7}, "sampled_tokens", 3), ({}, "calls", 32)],
)
def test_an_agent_without_end_is_ended_by_its_budget(rows: str, budget: Any, stop: str, turns: int) -> None:
    ([one], _) = play(rows, *["ab"] * 40, function=agents.endless, budget=budget)
    assert one.metadata[f"stop/{stop}"] == 1.0 and len(one.turn_starts) == turns


def test_an_agent_that_hangs_is_ended_by_its_seconds(rows: str) -> None:
    for budget, stop in (({"seconds": 0.5}, "seconds"), ({"call_seconds": 0.5}, "call_seconds")):
        ([one], _) = play(rows, "12", function=agents.hangs, budget=budget)
        assert one.metadata[f"stop/{stop}"] == 1.0 and one.reward == 0.0 and sampled(one) == ["12"]


def test_a_history_that_does_not_fit_is_refused_and_the_agent_may_go_on(rows: str) -> None:
    ([one], _) = play(rows, "12", function=agents.too_long)
    assert one.answer is not None and one.answer.startswith("400 ") and "context is 2000" in one.answer
    assert one.metadata["refused_calls"] == 1.0 and sampled(one) == ["12"]


def test_a_message_that_no_context_could_hold_is_refused_before_it_is_encoded(rows: str) -> None:
    def agent(assignment: Any) -> str:
        refused = agents.post(assignment, [{"role": "user", "content": "x" * 200_000}])
        return f"{refused['status']} {refused['error']['message']}"

    ([one], _) = play(rows, function=agent)
    assert one.answer is not None and one.answer.startswith("400 ") and "characters" in one.answer
    assert one.metadata["refused_calls"] == 1.0


def test_settings_that_would_change_the_distribution_are_refused(rows: str) -> None:
    ([one], _) = play(rows, "12", function=agents.refused_settings)
    assert one.answer is not None and one.answer.startswith("400 ") and "logit_bias" in one.answer


def test_calls_at_the_same_time_are_answered_one_after_the_other(rows: str) -> None:
    (branches, _) = play(rows, *"abcde", function=agents.in_parallel)
    assert sorted(turn for t in branches for turn in sampled(t)) == list("abcde")
    assert branches[-1].answer == "a b c d e"


AGENT = """
import json, os, sys, urllib.request
prompt = sys.stdin.read()
assert prompt == os.environ["RLVR_PROMPT"] == json.load(open(os.environ["RLVR_TASK"]))["prompt"]
assert "HIDDEN_API_KEY" not in os.environ and json.load(open(os.environ["RLVR_TASK"]))["row"] == {}
body = {"model": "any", "messages": [{"role": "user", "content": prompt}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def command(tmp_path: Path, end: str) -> list[str]:
    script = tmp_path / "agent.py"
    script.write_text(AGENT + end)
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("end", "result", "answer", "reward"),
    [
        ("", "answer", None, 0.0),
        ("print('said', said)", "output", "said 12", 0.0),
        ("print('reward', 0.25)", "reward", None, 0.25),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"answer\": \"x\", \"reward\": 2}')", "answer", "x", 2.0),
        (
            "print('said'); open(os.environ['RLVR_RESULT'], 'w').write('{\"metrics\": {\"n\": 1}}')",
            "output",
            "said",
            0.0,
        ),
        ("print(0.5); open(os.environ['RLVR_RESULT'], 'w').write('{\"metrics\": {\"n\": 1}}')", "reward", None, 0.5),
        (
            "import shutil; [shutil.rmtree(n) if os.path.isdir(n) else os.remove(n) for n in os.listdir('.')]",
            "answer",
            None,
            0.0,
        ),
    ],
)
def test_a_command_gets_its_task_and_gives_its_result(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, result: str, answer: str | None, reward: float
) -> None:
    monkeypatch.setenv("HIDDEN_API_KEY", "secret")
    ([one], _) = play(rows, "12", command=command(tmp_path, end), result=result)
    assert sampled(one) == ["12"] and one.answer == answer and one.metadata["stop/finished"] == 1.0
    assert one.scores["environment"].value == reward


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("print('gone'); os.kill(os.getpid(), 9)", "signal 9"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{nonsense')", "not JSON"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"reward\": NaN}')", "reward=nan"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"rewards\": 1}')", "'rewards'; expected only answer, reward"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('[1]')", "is of type list; expected nothing, a text"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"metrics\": [1]}')", "expected a mapping of names to numbers"),
        ("open(os.environ['RLVR_RESULT'], 'w').write(' ' * (2 << 20))", "larger than 1 MiB"),
    ],
)
def test_a_command_that_fails_is_an_error(rows: str, tmp_path: Path, end: str, words: str) -> None:
    ([one], _) = play(rows, "12", command=command(tmp_path, end))
    assert one.reward is None and words in one.scores["exact_match"].detail


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.mkfifo(os.environ['RLVR_RESULT'])", "expected a regular file"),
        ("os.mkdir(os.environ['RLVR_RESULT'])", "expected a regular file"),
        ("os.symlink('/etc/hostname', os.environ['RLVR_RESULT'])", "expected a regular file"),
        ("os.truncate(os.open(os.environ['RLVR_RESULT'], os.O_CREAT | os.O_WRONLY), 200 << 20)", "larger than 1 MiB"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"reward\": 1' + '0' * 400 + '}')", "reward="),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"metrics\": {\"\\\\u001b[2J\": 1}}')", "a metric named"),
        ("os.write(1, b'\\x1b[2J'); sys.exit(3)", "'\\x1b[2J'"),
    ],
)
def test_a_result_that_could_harm_its_reader_is_an_error(rows: str, tmp_path: Path, end: str, words: str) -> None:
    ([one], _) = play(rows, "12", command=command(tmp_path, end))
    detail = one.scores["exact_match"].detail
    assert one.reward is None and words in detail and "\x1b" not in detail


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ("print('kept'); [os.unlink(n) or os.mkfifo(n) for n in os.listdir('.') if n.startswith('output')]", "kept"),
        ("os.write(1, b'\\xff\\xed\\xa0\\x80 odd')", "\ufffd\ufffd\ufffd\ufffd odd"),
        ("[(os.mkdir('d'), os.chdir('d')) for _ in range(2_000)]; print('deep')", "deep"),
        ("open(os.environ['RLVR_RESULT'], 'w').write('{\"answer\": \"a\\\\ud800b\"}')", "a?b"),
    ],
)
def test_odd_files_and_outputs_hold_nobody_up(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, answer: str
) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    ([one], _) = play(rows, "12", command=command(tmp_path, end), result="output", budget={"seconds": 60.0})
    assert one.answer == answer and one.metadata["stop/finished"] == 1.0
    assert list(folders.iterdir()) == []


def test_a_result_is_read_after_all_processes_of_its_agent_ended(rows: str, tmp_path: Path) -> None:
    """A child that would replace it for ever has no say."""
    end = """
open(os.environ['RLVR_RESULT'], 'w').write('{"answer": "first"}')
if os.fork() == 0:
    import time
    time.sleep(1)
    open(os.environ['RLVR_RESULT'], 'w').write('{"answer": "second"}')
    time.sleep(60)
"""
    ([one], _) = play(rows, "12", command=command(tmp_path, end))
    assert one.answer == "first"


@pytest.mark.parametrize(
    ("prompt", "given"), [("日" * 50_000, None), ("a\0b", None), ("a\ud800b", "a?b"), ("日" * 30_000, "日" * 30_000)]
)
def test_a_prompt_that_the_system_takes_for_no_variable_is_in_the_file_alone(prompt: str, given: str | None) -> None:
    variables = Assignment.of(Task("1", prompt), "http://h", "policy", ()).variables
    assert variables.get("RLVR_PROMPT") == given
    subprocess.run(["/bin/true"], env=variables, check=True)


def test_files_of_a_command_are_found_from_its_own_folder(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    ([one], _) = play(rows, "12", command=[sys.executable, "agent.py"])
    assert one.metadata["stop/finished"] == 1.0


def test_bodies_of_one_rollout_are_bounded_in_all() -> None:
    refused: list[str] = []
    rollouts = OpenRollouts()
    first, second = rollouts.open(lambda call: None), rollouts.open(lambda call: None)
    first.hold(MAX_HELD)
    try:
        first.hold(1)
    except DialectError as error:
        refused.append(f"{error.status} {error}")
    second.hold(MAX_HELD)
    first.hold(-1)
    first.hold(1)
    assert len(refused) == 1 and refused[0].startswith("429 ") and "64 MiB" in refused[0]


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        open({path!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
import time
while not os.path.exists({path!r}): time.sleep(0.01)
time.sleep({seconds})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(("seconds", "stop"), [(0, "finished"), (60, "seconds")])
def test_no_process_of_an_agent_is_left(rows: str, tmp_path: Path, seconds: int, stop: str) -> None:
    path = tmp_path / "daemon.pid"
    end = DAEMON.format(path=str(path), seconds=seconds)
    ([one], _) = play(rows, "12", command=command(tmp_path, end), budget={"seconds": 3.0})
    assert one.metadata[f"stop/{stop}"] == 1.0
    state = Path(f"/proc/{path.read_text()}/stat")
    assert not state.exists() or ") Z " in state.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no agent given; expected exactly one of"),
        ({"command": ["x"], "url": "http://h"}, "command and url given"),
        ({"command": "python x.py"}, "expected a list of words"),
        ({"command": ["python", "-n", 5]}, "the word 5 is not text; quote it"),
        ({"function": "json:nothing"}, "nothing"),
        ({"url": "file:///etc/passwd"}, "expected http"),
        ({"function": agents.once, "result": "output"}, "needs a command"),
        ({"function": agents.once, "budget": {"call": 3}}, "call"),
        ({"function": agents.once, "budget": {"calls": 0}}, "budget.calls"),
        ({"function": agents.once, "rules": {"field": ["a"]}}, "field"),
        ({"function": agents.once, "rules": {"branches": "first"}}, "rules.branches"),
        ({"function": agents.once, "rules": {"budget": {}}}, "budget is an option of its own"),
        ({"function": agents.once, "rules": {"needs_reward": True}}, "it takes: fields, branches, keep_retried"),
        ({"function": agents.once, "result": "outputs"}, "expected one of answer, output, reward"),
        ({"command": ["python", "no_such_agent.py"]}, "there is no file 'no_such_agent.py' in"),
    ],
)
def test_what_cannot_be_is_refused_at_once(rows: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match="agent") as refused:
        AgentSource("dataset", {"path": rows, "reward": "exact_match"}, **options)
    assert words in str(refused.value)


def test_fields_of_the_row_are_shown_only_if_they_are_asked_for(rows: str) -> None:
    def agent(assignment: Any) -> str:
        return json.dumps(assignment.row)

    ([one], _) = play(rows, function=agent, rules={"fields": ["answer"]})
    assert one.answer is not None and list(json.loads(one.answer)) == ["answer"]
    with pytest.raises(ValueError, match=r"'hint'.*it has answer"):
        play(rows, function=agent, rules={"fields": ["hint"]})


def test_the_page_has_every_rule_and_budget_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train" / "agents.md").read_text(encoding="utf-8")
    for kind in (AgentRules, AgentBudget):
        for one in fields(kind):
            if one.name not in ("budget", "needs_reward"):  # a part of its own, and what `result` says
                value = one.default
                shown = "none" if value is None else "`[]`" if value == () else f"`{str(value).lower()}`"
                shown = shown.replace(".0`", "`")
                assert f"| `{one.name}` | {shown} |" in page, one.name


def test_parallel_calls_sample_the_same_in_whatever_order_they_arrive(rows: str) -> None:
    """Equal calls are told apart by their number, all others by what they read, also from those of other episodes."""

    class Sampler(ScriptedSamplingClient):
        """Says a word that its seed draws."""

        seeds: list[int] = []  # noqa: RUF012

        def sample(self, prompt: Any, num_samples: int, sampling_params: SamplingParams, *more: Any) -> Any:
            assert sampling_params.seed is not None
            self.seeds = [*self.seeds, *(sampling_params.seed + n for n in range(num_samples))]
            return super().sample(prompt, num_samples, sampling_params, *more)

    def run(parallel: bool, *orders: list[int]) -> list[Any]:
        left = iter(orders)
        made = AgentSource(
            "dataset",
            {"path": rows, "reward": "exact_match"},
            function=lambda assignment: agents.fan_out(assignment, next(left)),
            rules={"parallel": parallel},
        )

        def say(number: int) -> list[int]:
            return [*TEXT.encode(str(sampler.seeds[number] % 10**9), add_special_tokens=False), TEXT.eos_token_id]

        sampler = Sampler(TEXT, say)
        groups = open_groups(made, [made.train(0, 0, "")], len(orders), TEXT, "g")
        played = rollout(groups, sampler, SamplingParams(60), seed=1)
        return [(one.rollout_id, one.full_tokens, one.action_mask) for one in played]

    one, other = [0, 1, 2, 5], [5, 1, 2, 0]
    assert len(run(True, one, other)) == 8, "of two equal calls the last counts"
    assert run(True, one, other) == run(True, other, one)
    assert len({str(tokens) for _, tokens, _ in run(True, one, one)}) == 8
    assert run(False, one, other) != run(False, other, one)


def test_calls_of_more_tokens_than_the_run_allows_are_refused(rows: str) -> None:
    from rlvr.envs.long_prompts import limit_prompts

    made = AgentSource("dataset", {"path": rows, "reward": "exact_match"}, function=agents.too_long)
    bounded = limit_prompts(made, TEXT, 90, "filter", lambda text: None, "key")
    sampler = ScriptedSamplingClient(TEXT, lambda number: [TEXT.eos_token_id])
    (only,) = rollout(open_groups(bounded, [bounded.train(0, 0, "")], 1, TEXT, "g"), sampler, SamplingParams(9), seed=1)
    assert only.answer is not None and "more than training.max_prompt_tokens=90" in only.answer
    assert only.metadata["refused_calls"] == 1.0 and only.metadata["calls"] == 1.0
    with pytest.raises(ValueError, match=r"training\.long_prompts=truncate_left is not supported"):
        limit_prompts(made, TEXT, 90, "truncate_left", lambda text: None, "key")
