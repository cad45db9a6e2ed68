"""`rlvr env check`: every planted fault is found by its name, and sound environments have none."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlvr.audits.commands import parse_range
from rlvr.audits.environment.answer_texts import list_words
from rlvr.audits.environment.check_report import CHECKS, CheckResult, CheckState, EnvironmentReport, report_share
from rlvr.audits.environment.environment_check import CheckOptions, check_environment
from rlvr.audits.environment.leak_checks import (
    encode_answer,
    find_choice,
    find_excess,
    holds_answer,
    holds_digest,
    tail_probability,
)
from rlvr.audits.environment.scripted_play import CheckedEnvironment, EpisodeHangs, run_with_limit
from rlvr.audits.environment.signal_checks import check_duplicates
from rlvr.audits.environment.text_tokenizer import CHAT_TEMPLATE, TextTokenizer
from rlvr.audits.environment.verifier_checks import swap_digits
from rlvr.audits.verifier_faults import HEAVY, find_faults
from rlvr.chat.tool_calls import ToolCallFormat
from rlvr.cli.main import run
from rlvr.core.types import Task
from rlvr.envs.groups import EnvGroupBuilder, GroupSource, RLDataset
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.rpn_arithmetic import RPNArithmetic
from rlvr.reward import resolve_reward
from tests.kit.broken_environments import ATTACKED, BROKEN, ELSEWHERE, HERE

SOUND: dict[str, dict[str, Any]] = {
    f"{HERE}:Sums": {},
    f"{HERE}:Choices": {},
    f"{HERE}:ChatSums": {},
    f"{HERE}:AnyOrder": {},
    f"{HERE}:Between": {},
    f"{HERE}:file_to_read": {},
    f"{HERE}:SeedsAll": {},
    f"{HERE}:Dice": {},
    f"{HERE}:Walk": {},
    "tests.kit.environments_of_tests:Countdown": {},
    "sorting": {},
    "rpn_arithmetic": {},
    "tool_arithmetic": {},
    "take_away": {},
    "small_tasks": {"strict_texts": True},
    "tools": {"inner": f"{HERE}:Sums", "environment": f"{HERE}:_Desk"},
    "refine": {"inner": "sorting"},  # an episode ends with the first right turn
}
QUICK = CheckOptions(tasks=16, hang_s=2.0, fresh_process=False)
WHOLE = CheckOptions(tasks=16, hang_s=2.0)
FEW = (
    "JudgedContains",
    "SharedRows",
    "AnswerInPrompt",
    "ClassState",
    "Cumulative",
    "Hanging",
    "KeepsEpisodes",
    "WrongHeldout",
)


def find_faults_of(name: str, options: CheckOptions = QUICK) -> EnvironmentReport:
    return check_environment(f"{HERE}:{name}", {}, options)


def write_problems(path: Path) -> Path:
    """Problems in GSM8K's form, with worked solutions."""
    rows: list[str] = []
    for n in range(1, 121):
        a, b = 3 + 7 * n % 53, 2 + 11 * n % 31
        question = f"Row {n} has {a} trees of {b} apples each, and {n} apples fell. How many apples hang there?"
        answer = f"{a} trees have {a} * {b} = {a * b} apples. {a * b} - {n} = {a * b - n}.\n#### {a * b - n}"
        rows.append(json.dumps({"question": question, "answer": answer}))
    path.mkdir()
    (path / "train.jsonl").write_text("\n".join(rows[:90]) + "\n")
    (path / "test.jsonl").write_text("\n".join(rows[90:]) + "\n")
    return path


@pytest.mark.parametrize("name", FEW)
def test_a_planted_fault_is_found_by_its_name(name: str) -> None:
    assert set(BROKEN[name]) & set(find_faults_of(name).faults)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what hostile answers leave open
@pytest.mark.parametrize("name", sorted(set(BROKEN) - set(FEW)))
def test_every_planted_fault_is_found_by_its_name(name: str) -> None:
    report = find_faults_of(name, WHOLE if name in ELSEWHERE else QUICK)
    assert set(BROKEN[name]) & set(report.faults), report.table()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKED))
def test_a_search_finds_rewards_that_take_no_answer(name: str) -> None:
    assert not set(ATTACKED[name]) & set(find_faults_of(name).faults)
    attacked = find_faults_of(name, replace(QUICK, hang_s=5.0, attack=True))
    assert set(ATTACKED[name]) & set(attacked.faults), attacked.table()


@pytest.mark.parametrize("name", [f"{HERE}:ChatSums", "tests.kit.environments_of_tests:Countdown", "rpn_arithmetic"])
def test_a_sound_environment_has_no_fault(name: str) -> None:
    report = check_environment(name, SOUND[name], QUICK)
    assert report.faults == {}, report.table()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOUND))
def test_sound_environments_have_no_fault(name: str) -> None:
    report = check_environment(name, SOUND[name], CheckOptions())
    assert report.faults == {}, report.table()


@pytest.mark.slow
def test_programs_and_word_problems_have_no_fault(tmp_path: Path) -> None:
    problems = {"path": str(write_problems(tmp_path / "problems"))}
    for name, kwargs in (("gsm8k", problems), ("mini_mbpp", {})):
        report = check_environment(name, kwargs, QUICK)
        assert report.faults == {}, report.table()


def test_a_search_without_references_says_what_it_compares_with() -> None:
    results = {(name, one.name): one for name in ("Walk", "Dice") for one in find_faults_of(name).results}
    floor = results["Walk", "floor_gap"]
    assert floor.state is CheckState.WARNING and "a search found" in floor.text
    assert results["Dice", "reward_reachability"].state is CheckState.SOUND, "it needs two turns of one word"


def test_a_hash_of_a_short_answer_tells_it() -> None:
    digest = hashlib.md5(b"42").hexdigest()
    assert holds_digest(f"task-{digest}", "42") and holds_digest(f"task-{digest[:8].upper()}/x", "42")
    assert not holds_digest(f"task-{digest[:7]} {digest[8:]} 00000042 x{digest}", "42")


def test_each_kind_of_fault_is_planted_twice() -> None:
    planted = [check for checks in (*BROKEN.values(), *ATTACKED.values()) for check in checks]
    rare = {name for name in CHECKS if planted.count(name) < 2}
    assert rare == {"reward_reachability"}  # a game that never pays may be too hard for the search: a warning
    assert len(BROKEN) + len(ATTACKED) >= 40


def test_the_command_says_what_is_wrong_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    arguments = ["env", "check", f"{HERE}:SharedRows", "--tasks", "8", "--json", str(file)]
    assert run(arguments) == 1
    shown = capsys.readouterr().out
    assert "splits_disjoint" in shown and "faults: splits_disjoint" in shown
    report = json.loads(file.read_text())
    (check,) = [one for one in report["checks"] if one["check"] == "splits_disjoint"]
    assert not report["sound"] and check["state"] == "fault" and check["hits"] > 0 and check["examples"]
    assert 0 < check["interval"]["low"] < check["interval"]["high"] < 1
    assert {one["openenv"] for one in report["checks"]} >= {"runtime.seed_control", "semantic.oracle_max"}


def test_where_the_policy_writes_the_tasks_it_must_not_write_held_out_ones() -> None:
    class Forgetful(RPNArithmetic):
        def parse_task(self, text: str) -> Task | None:
            task = super().parse_task(text)
            return task and replace(task, id=f"written {task.id}")

        def is_heldout(self, id: str) -> bool:
            return not id.startswith("written ") and super().is_heldout(id)

    for inner, expected in ((RPNArithmetic(), []), (Forgetful(), ["splits_disjoint"])):
        report = check_environment("propose", {"inner": inner}, QUICK)
        assert list(report.faults) == expected
        states = {one.name: one.state for one in report.results}
        assert states["near_duplicates"] is CheckState.NOT_TRIED, "its training prompts are no tasks"
        assert states["oracle_max"] is CheckState.SOUND, "what the solver is asked has right answers"
        assert "written by the policy" in report.table()


def test_a_fault_that_is_intended_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["env", "check", f"{HERE}:SharedRows", "--tasks", "8", "--allow", "splits_disjoint"]
    assert run(arguments) == 0
    assert "faults: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sortin"], "did you mean 'sorting'"),
        (["sorting", "digit=3"], "digit"),
        (["sorting", "digits"], "expected key=value"),
        (["sorting", "--allow", "floorgap"], "did you mean 'floor_gap'"),
        (["sorting", "--reward-range", "1"], "--reward-range '1', expected two numbers"),
        (["sorting", "--tasks", "1"], "expected at least 4 tasks"),
    ],
)
def test_a_mistake_of_the_user_ends_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "check", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_episode_that_seeds_the_whole_process_is_a_warning() -> None:
    report = find_faults_of("SeedsAll")
    assert "episode_isolation" in report.warnings and report.faults == {}, report.table()
    assert "seeds Python's `random`" in report.table()


def test_two_digits_are_exchanged_where_that_is_another_number() -> None:
    numbers = ("1204", "42", "111", "1112", "-305", "50", "3.25", "31.5", "word", "7", "1.2.3")
    assert [swap_digits(one) for one in numbers] == [
        "2104", "24", None, "1121", None, None, None, "13.5", None, None, None,
    ]  # fmt: skip


def test_rewards_are_held_to_a_given_range() -> None:
    report = check_environment("sorting", {}, replace(QUICK, reward_range=parse_range("env check", "0,0.5")))
    assert "reward_well_formed" in report.faults


def test_a_model_samples_for_the_signal(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlvr.engine.tokenizer import build_tokenizer
    from tests.kit.tiny import CONFIGS

    tokenizer = build_tokenizer("words", [*map(str, range(10)), "sort", ":"], end="<end>", pad="<pad>")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**CONFIGS["llama"], vocab_size=len(tokenizer), **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    report = check_environment("sorting", {}, replace(QUICK, tasks=4, samples=2, model=str(tmp_path)))
    (signal,) = [one for one in report.results if one.name == "training_signal"]
    assert "the model solves" in signal.text


def test_an_episode_that_hangs_leaves_the_other_checks_untried() -> None:
    report = find_faults_of("Hanging", replace(QUICK, hang_s=0.5))
    assert set(report.faults) == {"resource_bounds"}
    assert {one.state for one in report.results if one.name == "oracle_max"} == {CheckState.NOT_TRIED}


TOKENIZER = TextTokenizer()


class Duel(EnvGroupBuilder):
    """The longer of two answers wins."""

    async def make_envs(self) -> list[Any]:
        return [PromptEnv(Task("duel", "Say much."), TOKENIZER) for _ in range(2)]

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Any) -> list[Any]:
        lengths = [sum(len(turn.ac.tokens) for turn in one.transitions) for one in trajectory_group]
        return [(float(length == max(lengths)), {}) for length in lengths]


class Duels(RLDataset):
    def get_batch(self, index: int) -> list[Duel]:
        return [Duel()]

    def __len__(self) -> int:
        return 4


def make_duels() -> GroupSource:
    return GroupSource(Duels())


def test_rewards_that_compare_a_group_are_no_fault() -> None:
    report = check_environment(f"{__name__}:make_duels", {}, QUICK)
    assert report.faults == {}, report.table()
    assert {"canary_floor", "training_signal"} <= set(report.warnings)


def test_a_call_beyond_its_limit_is_told() -> None:
    import time

    assert run_with_limit(lambda: 3, 5.0, "it") == 3
    with pytest.raises(EpisodeHangs, match=r"it took longer than 0\.05 s"):
        run_with_limit(lambda: time.sleep(1), 0.05, "it")
    with pytest.raises(KeyError):
        run_with_limit(lambda: {}["x"], 5.0, "it")


def test_the_text_tokenizer_gives_any_text_back_and_has_calls_of_tools() -> None:
    tokenizer = TextTokenizer(CHAT_TEMPLATE)
    text = "é\x00\u2028 <|im_end|> 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_token_id]) == "a<|im_end|>"
    assert ToolCallFormat.of_template(tokenizer) == ToolCallFormat("<tool_call>", "</tool_call>", "name", "arguments")


def test_episodes_are_played_with_the_turns_that_are_given() -> None:
    game = CheckedEnvironment.open("tests.kit.environments_of_tests:Countdown", {}, tasks=4)
    task = Task("seed-2", "", {"seed": 2})
    (right, wrong) = game.play([(task, ("2", "1", "0")), (task, ("2", "0"))])
    assert (right.rewards, right.value, right.observations) == ((0.25, 0.25, 0.25), 0.75, ("3", "gogo"))
    assert (wrong.rewards, wrong.value) == ((0.25, 0.0), 0.25)
    game.search_turns(["0", "1", "2"], tasks=4)
    assert all(one.turns[-1] == "0" for one in game.search.values())


def test_a_share_without_hits_is_sound_and_has_an_upper_bound() -> None:
    none, some = report_share("task_ids", [], 100, "x"), report_share("task_ids", ["a", "a", "b"], 100, "x")
    assert (none.state, some.state, some.hits, some.examples) == (CheckState.SOUND, CheckState.FAULT, 3, ("a", "b"))
    assert none.bound == " (faults below 3.7%)"  # Wilson: z^2 / (n + z^2)
    assert report_share("task_ids", ["a"], 100, "x", most=0.05).state is CheckState.WARNING
    assert report_share("task_ids", [], 0, "x").state is CheckState.NOT_TRIED


def test_the_worst_result_of_a_check_counts() -> None:
    found = [
        CheckResult("task_ids", CheckState.SOUND, "one", 3),
        CheckResult("task_ids", CheckState.FAULT, "two", 4, ("e",)),
        CheckResult("startup", CheckState.SOUND, "", 1),
    ]
    report = EnvironmentReport.of("x", found, 1.0, {}, ())
    assert [(one.name, one.state, one.trials) for one in report.results] == [
        ("startup", CheckState.SOUND, 1),
        ("task_ids", CheckState.FAULT, 7),
    ]
    assert "two" in report.table() and "e.g. e" in report.table()


def test_a_near_duplicate_with_another_answer_is_a_warning() -> None:
    """A policy that knows the training tasks by heart gives a wrong answer to it."""
    for name, state in (("Paraphrased", CheckState.FAULT), ("ParaphrasedOtherwise", CheckState.WARNING)):
        found = check_duplicates(CheckedEnvironment.open(f"{HERE}:{name}", {}))
        assert [one.state for one in found if "held-out" in one.text and one.hits] == [state]


def test_a_number_is_the_place_of_a_choice_in_a_row_alone() -> None:
    """Lines such as `A: ...` in a text may be anything, and 1 its answer."""
    environment = CheckedEnvironment.open(f"{HERE}:Sums", {})
    text = "A: wire\nB: wire\nWhat comes out?"
    asked = [Task(f"t{n}", text, {"answer": "1", **more}) for n, more in enumerate(({}, {"choices": ["x", "y"]}))]
    assert [find_choice(environment, task) for task in asked] == [None, (["x", "y"], 1)]


def test_a_text_that_all_tasks_share_tells_no_answer() -> None:
    same = [(Task(str(n), "Say yes or no. Answer: yes"), "yes" if n % 2 else "no") for n in range(20)]
    assert find_excess(same, lambda task: str(task.prompt), holds_answer, 0.0) == []
    own = [(Task(str(n), f"Hint {100 + n}."), str(100 + n)) for n in range(20)]
    assert len(find_excess(own, lambda task: str(task.prompt), holds_answer, 0.0)) == 20


def test_the_audit_of_verifiers_counts_its_probes() -> None:
    rows = [
        {"prompt": f"What is {n} + 1?", "answer": str(n + 1), "response": str(n + 1), "label": True}
        for n in (490_228_469, 7)  # of nine digits: as 490.228.470 it is no number
    ]
    light, heavy = (find_faults(rows, resolve_reward("exact_match"), heavy=heavy) for heavy in (False, True))
    assert light.evidence == heavy.evidence == {}
    assert light.probes["separators"] == heavy.probes["separators"] == 1
    assert heavy.probes["junk"] - light.probes["junk"] == len(HEAVY) * len(rows)


def test_small_numbers_of_the_leak_checks() -> None:
    assert tail_probability(2, 2, 0.5) == 0.25
    assert tail_probability(1, 3, 0.5) == 0.875
    assert (
        holds_answer("It is 42.", "42")
        and not holds_answer("It is 142.", "42")
        and not holds_answer("It is 42.5", "42")
    )
    assert encode_answer("1234") == ["31323334", "MTIzNA"] and encode_answer("7") == []


def test_words_that_are_seen_equally_often_keep_their_order() -> None:
    """An order of a set would differ from process to process, and what is found with it."""
    words = [f"word{number:02}" for number in range(40)]
    shown = SimpleNamespace(prompt_text=" ".join(words))
    source = SimpleNamespace(choices=(), vocabulary=None)
    environment: Any = SimpleNamespace(source=source, tasks=[shown], played_episodes=[], find_answer=lambda task: None)
    assert list_words(environment) == words
