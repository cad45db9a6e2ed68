"""The teacher of a run: a model, a run or an endpoint, with the policy's tokenizer and with log-probs, or an error.

The engine's open endpoint is one teacher; another is a small server whose answers a test writes, in the form of vLLM's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.task_teachers import TaskTeachers
from rlvr.algorithms.terms.distillation import add_teacher_advantages
from rlvr.clients.endpoint import EndpointError
from rlvr.clients.mock.tabular_policy import WordTokenizer
from rlvr.clients.teacher import EndpointTeacher, TeacherOptions, check_same_tokens
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import ModelInput
from rlvr.core.types import Task, Trajectory
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from tests.kit.open_server import open_endpoints, text_engine
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, serving
from tests.kit.tinker_model import write_model
from tests.kit.tiny_run import TINY, attempt, stored_steps


@contextmanager
def asking(url: str, name: str = "large") -> Iterator[EndpointTeacher]:
    with closing(EndpointTeacher(TeacherOptions(url=url, name=name, retries=0, timeout_s=20.0))) as teacher:
        yield teacher


@pytest.fixture(scope="module")
def words() -> Any:
    return build_tokenizer("words", [*"abcdefgh"], end="<end>", pad="<pad>")


def completion(words: Any, prompt: list[int], logprob: Any = -0.5) -> str:
    """An answer as vLLM sends it: the prompt's tokens, the first without a log-prob, and one more."""
    texts = [words.decode([token]) for token in [*prompt, prompt[0]]]
    scores = {"tokens": texts, "token_logprobs": [None, *[logprob] * len(prompt)], "top_logprobs": None}
    return json.dumps({"choices": [{"index": 0, "text": "", "logprobs": scores}]})


def test_the_engines_endpoint_gives_the_log_probs_of_its_own_sampler(tmp_path: Path) -> None:
    """`rlvr serve engine` as the teacher: the same numbers as its client in this process, at every token."""
    engine = text_engine()
    tokenizer = engine.model.tokenizer
    tokens = tokenizer.encode("What is 4 + 5?\nassistant\n9")
    with open_endpoints({"small": engine}, tmp_path) as (_, port):
        with asking(f"http://127.0.0.1:{port}/v1", "small") as teacher:
            teacher.check(tokenizer, "small")
            found = teacher.compute_logprobs(ModelInput(tokens)).result()
            with pytest.raises(
                ValueError, match=r"another tokenizer than the policy \(student\): token \d+ is '.*' there"
            ):
                teacher.check(build_tokenizer("words", [*"abcdefgh"], end="<end>", pad="<pad>"), "student")
        time.sleep(0.2)  # the server sees that the connection is closed before it ends itself
    own = engine.logprobs(engine.base_snapshot(), ModelInput(tokens)).result()
    assert found[0] is None and found[1:] == pytest.approx(own[1:], abs=1e-6)


def test_a_server_like_vllm_is_asked_for_the_log_probs_of_token_ids(words: Any) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: EndpointRequest) -> EndpointReply:
        asked.append(request.body)
        return EndpointReply(raw=completion(words, request.body["prompt"]))

    with serving(answer) as server, asking(server.chat_url) as teacher:
        teacher.check(words, "student")
        assert teacher.compute_logprobs(ModelInput([3, 4, 5])).result() == [None, -0.5, -0.5]
        with pytest.raises(ValueError, match=r"rollout.temperature=0.5 with the teacher large at .*use rollout.temp"):
            teacher.compute_logprobs(ModelInput([3, 4]), 0.5)
    expected = {"prompt": [3, 4, 5], "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 1.0, "model": "large"}
    assert asked[-1] == expected


@pytest.mark.parametrize("logprobs", ["null", '{"tokens": [], "token_logprobs": []}', "nan"])
def test_an_endpoint_without_log_probs_is_refused(logprobs: str, words: Any) -> None:
    def answer(request: EndpointRequest) -> EndpointReply:
        if logprobs == "nan":
            return EndpointReply(raw=completion(words, request.body["prompt"], None))
        return EndpointReply(raw='{"choices": [{"text": "", "logprobs": ' + logprobs + "}]}")

    refusal = pytest.raises(
        ValueError, match=r"teacher large at http.* cannot score tokens .*as a trial.* sent no log-prob"
    )
    with serving(answer) as server, asking(server.chat_url) as teacher, refusal:
        teacher.check(words, "student")


def test_a_teacher_that_is_gone_is_an_error_and_no_log_prob(words: Any) -> None:
    refusal = pytest.raises(EndpointError, match="answered 500")
    with serving(lambda request: EndpointReply("", status=500)) as server, asking(server.chat_url) as teacher, refusal:
        teacher.compute_logprobs(ModelInput([3, 4])).result()


def test_two_tokenizers_are_compared_token_by_token(words: Any) -> None:
    other = build_tokenizer("words", [*"hgfedcba"], end="<end>", pad="<pad>")
    fewer = build_tokenizer("words", [*"abcdefg"], end="<end>", pad="<pad>")
    check_same_tokens(words, build_tokenizer("words", [*"abcdefgh"], end="<end>", pad="<pad>"), "same", "student")
    with pytest.raises(ValueError, match=r"mine has another tokenizer.*there and '\w' for the policy"):
        check_same_tokens(words, other, "mine", "student")
    with pytest.raises(ValueError, match=r"small has another tokenizer"):
        check_same_tokens(words, fewer, "small", "student")
    more = build_tokenizer("words", [*"abcdefgh"], end="<end>", pad="<pad>")
    more.add_tokens(["later"])
    check_same_tokens(words, more, "larger", "student")
    with pytest.raises(ValueError, match=r"words has .*is None there and 'later' for the policy"):
        check_same_tokens(more, words, "words", "student")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.name=distillation"], r"algorithm.teacher_coef=1 without a teacher; give teacher.model"),
        (["algorithm.teacher_coef=0.5", "teacher.url=http://127.0.0.1:9/v1"], r"url=.* and name=None belong together"),
        (["algorithm.teacher_coef=0.5", "teacher.url=there", "teacher.name=x"], r"base_url='there'"),
        (["teacher.model=runs/other"], r"teacher.model \(algorithm.teacher_coef is 0\)"),
        (["training.mode=sft", "algorithm.teacher_coef=1"], r"training.mode is sft"),
        (
            ["algorithm.name=distillation", "teacher.model=a", "teacher.url=http://127.0.0.1:9/v1", "teacher.name=x"],
            r"are both given; give one of them",
        ),
        (
            [
                "algorithm.name=distillation",
                "teacher.url=http://127.0.0.1:9/v1",
                "teacher.name=x",
                "rollout.temperature=2",
            ],
            r"rollout.temperature=2 with teacher.url",
        ),
    ],
)
def test_a_plan_names_what_is_wrong_with_the_teacher(settings: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    with pytest.raises(ValueError, match=message):
        config = build_config(load(None, str(tmp_path / "tiny.yaml"), settings))
        plan(assemble(config))


def test_a_table_of_words_is_compared_like_any_tokenizer(words: Any) -> None:
    """The mock client's runs: their tokens are not a model's, and the same words are the same tokens."""
    table = WordTokenizer([*"abc"])
    check_same_tokens(table, WordTokenizer([*"abc"]), "twin", "client=mock")
    with pytest.raises(ValueError, match=r"runs/table has another tokenizer than the policy \(model.name=m\)"):
        check_same_tokens(words, table, "runs/table", "model.name=m")


def check_student_nears_and_resumes(runs: Path, student: list[str]) -> None:
    """The distance to the teacher halves at least, and a killed run has the rows of an unbroken one."""
    attempt("tiny.yaml", *student, "run.name=student")
    with pytest.raises(KeyboardInterrupt):
        attempt("tiny.yaml", *student, "run.name=killed", killed_at=5)
    attempt("tiny.yaml", *student, "run.name=killed")
    rows = stored_steps(runs / "student")
    assert stored_steps(runs / "killed") == rows
    gaps = [row["teacher/kl"] for row in rows if row["phase"] == "rl"]
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3]) and gaps[0] > 0.5


@pytest.mark.slow
def test_a_run_learns_from_another_run_resumes_to_the_bit_and_refuses_other_tokens(tmp_path: Path, monkeypatch) -> None:
    """The teacher is a run that was fine-tuned; the student begins at random weights and comes nearer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    taught = ["sft.steps=60", "sft.batch_size=32", "sft.optimizer.learning_rate=0.01", "training.steps=0"]
    attempt("tiny.yaml", *taught, "run.name=teacher")
    student = [
        "algorithm.name=distillation", "teacher.model=runs/teacher", "sft.steps=0", "training.steps=12",
        "training.prompts_per_step=8", "training.optimizer.learning_rate=0.03",
    ]  # fmt: skip
    check_student_nears_and_resumes(tmp_path / "runs", student)
    write_model(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"teacher.model=model has another tokenizer than .*tokenizer=words.: token 0 is"
    ):
        attempt("tiny.yaml", *student, "run.name=other", "teacher.model=model")


def settings_of(tmp_path: Path, *words: str) -> Any:
    (tmp_path / "tiny.yaml").write_text(TINY.replace("complexity: [1, 1]", "complexity: [1, 2]"))
    return assemble(build_config(load(None, str(tmp_path / "tiny.yaml"), ["algorithm.name=distillation", *words])))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["teachers={1: a}"], r"task '.*' has the source None, and there are teachers for 1; add one, or give"),
        (["teacher.task_key=level", "teachers={1: a}"], r"has the level '2', and there are teachers for 1; add"),
        (["teachers={1: {modle: a}}"], r"teacher.for_tasks.1 has no key 'modle' .did you mean 'model'"),
        (["teachers={1: {url: 'http://127.0.0.1:9/v1'}}"], r"teacher.for_tasks.1: url=.* and name=None belong"),
        (["teachers={1: {retries: 3}}"], r"teacher.for_tasks.1={'retries': 3} names no teacher; give model, or url"),
        (["teachers={1: {model: a, retries: many}}"], r"teacher.for_tasks.1: retries='many': input should be"),
        (["teachers={1: 3}"], r"teacher.for_tasks.1=3: expected a model, or its keys: model, url, name"),
        (["teachers={1: {task_key: level}}"], r"teacher.for_tasks.1 has no key 'task_key'"),
        (["teacher.model=a", "teacher.task_key=level"], r"teacher.task_key .teacher.for_tasks is empty"),
        (
            ["teachers={1: {url: 'http://127.0.0.1:9/v1', name: x}, 2: a}", "rollout.temperature=2"],
            r"rollout.temperature=2 with teacher.url",
        ),
    ],
)  # fmt: skip
def test_a_plan_names_what_is_wrong_with_one_of_several_teachers(
    settings: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(settings_of(tmp_path, *settings))


def test_a_plan_says_which_tasks_each_teacher_has_and_what_memory_all_take(tmp_path: Path, monkeypatch) -> None:
    """A model that two entries name by other paths counts once; an endpoint takes none."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    both = f"teachers={{1: model, 2: {tmp_path}/model}}"
    lines = plan(settings_of(tmp_path, "teacher.task_key=level", both))
    assert lines["teacher"].startswith("1 teachers; in this process about ") and "float32" in lines["teacher"]
    assert lines["  level=1"] == "model; 128 of 256 tasks" and lines["  level=2"].endswith("128 of 256 tasks")
    there = "teachers={1: {url: 'http://127.0.0.1:9/v1', name: x}}"
    lines = plan(settings_of(tmp_path, "teacher.task_key=level", there, "teacher.model=model"))
    assert lines["teacher"].startswith("2 teachers") and lines["  level=1"].startswith("x at http://127")
    assert lines["  other level"] == "model; 128 of 256 tasks"
    one = plan(settings_of(tmp_path, "teacher.model=model"))
    assert one["teacher"].startswith("model; in this process about ")


def test_a_task_is_taught_by_its_own_teacher(tmp_path: Path) -> None:
    """By the endpoint's log-prob of -token, and by another of -2 token; a task that neither has is named."""

    class Scripted:
        def __init__(self, times: float) -> None:
            self.times, self.closed = times, 0

        def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Any:
            return LazyFuture.from_value([None, *(-self.times * token for token in prompt.tokens[1:])])

        def close(self) -> None:
            self.closed += 1

    def answer(source: str) -> Trajectory:
        task = Task(source, "p", {"source": source} if source else {})
        return Trajectory("p", [9], "r", [3], [-1.0], reward=0.0, rollout_id=source, task=task)

    once, twice = Scripted(1.0), Scripted(2.0)
    teachers = TaskTeachers({"code": once, "math": twice, "more": once})
    batch = [answer("math"), answer("code"), answer("more")]
    add_teacher_advantages(batch, teachers, 1.0, 1.0)
    assert [t.token_advantages for t in batch] == [[-5.0], [-2.0], [-2.0]]
    teachers.close()
    assert (once.closed, twice.closed) == (1, 1)
    with pytest.raises(ValueError, match=r"task 'chat' has the source 'chat', and there are teachers for code, math"):
        add_teacher_advantages([answer("chat")], teachers, 1.0, 1.0)
    rest = TaskTeachers({"code": once}, default=twice)
    add_teacher_advantages(batch, rest, 1.0, 1.0)
    assert batch[2].teacher_logprobs == [-6.0]
    assert rest.of_task(answer("").task) is twice and rest.of_task(None) is twice


@pytest.mark.slow
def test_two_teachers_teach_each_its_own_tasks(tmp_path: Path, monkeypatch) -> None:
    """Runs that were fine-tuned on one level each: the student nears each on its level, and resumes to the bit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("complexity: [1, 1]", "complexity: [1, 2]"))
    taught = ["sft.steps=60", "sft.batch_size=32", "sft.optimizer.learning_rate=0.01", "training.steps=0"]
    for level, other in ((1, 2), (2, 1)):
        only = f"sft.curriculum={{by: schedule, schedule: [[0, {{'{level}': 1, '{other}': 0}}]]}}"
        attempt("tiny.yaml", *taught, only, f"run.name=teacher{level}")
    student = [
        "algorithm.name=distillation", "teachers={'1': runs/teacher1, '2': runs/teacher2}", "teacher.task_key=level",
        "sft.steps=0", "training.steps=12", "training.prompts_per_step=8", "training.optimizer.learning_rate=0.03",
    ]  # fmt: skip
    check_student_nears_and_resumes(tmp_path / "runs", student)
    write_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has another tokenizer than the policy"):
        mixed = "teachers={'1': runs/teacher1, '2': model}"
        attempt("tiny.yaml", *student, mixed, "run.name=other")
