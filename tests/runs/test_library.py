"""`rlvr.train`, `rlvr.evaluate` and `rlvr.load_run`: the runs of the command line, from objects of a program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.algorithms.optimizers import AdamW
from rlvr.cli.main import run as run_command
from rlvr.core.registry import load_object, load_path, name_object
from rlvr.envs.dataset import dataset
from rlvr.runs.program_settings import settings_of
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.loop import TrainingLoop
from tests.kit.chat_rows import qwen_folder

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]
SHORT: dict[str, Any] = {
    "steps": 2, "group_size": 4, "prompts_per_step": 2, "max_tokens": 4, "learning_rate": 1e-3, "lora": {"rank": 2},
    "evaluation": {"tasks": 3, "samples": 2}, "threads": 1, "quiet": True,
}  # fmt: skip


def digits(prompt: str, response: str, meta: dict[str, Any]) -> float:
    return sum(character.isdigit() for character in response) / 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Callable[..., rlvr.Run]:
    return partial(rlvr.train, model, root=tmp_path / "runs", **SHORT)


def test_a_run_from_python_has_the_bits_of_the_same_run_by_the_command_line(
    train: Callable[..., rlvr.Run], model: Path, tmp_path: Path
) -> None:
    run = train(ROWS, digits)
    file = run.settings["env"]["kwargs"]["path"]
    words = [
        f"model.name={model}", f"env.kwargs.path={file}", "reward.type=tests.runs.test_library:digits",
        "training.steps=2", "group_size=4", "training.prompts_per_step=2", "rollout.max_tokens=4",
        "learning_rate=1e-3", "model.lora.rank=2", "evaluation.tasks=3", "evaluation.samples=2", "engine.threads=1",
        f"run.root={tmp_path / 'typed'}", "run.name=typed",
    ]  # fmt: skip
    assert run_command(["train", "--config-name=dataset", *words]) == 0
    typed = rlvr.load_run(tmp_path / "typed" / "typed")
    assert typed.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert [row["reward"] for row in typed.metrics] == [row["reward"] for row in run.metrics]
    assert len(run.rollouts(1)) == len(run.rollouts()) / 2 > 0 and run.checkpoints
    assert run.plot(tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_call_is_the_same_run_and_another_call_another(train: Callable[..., rlvr.Run]) -> None:
    run = train(ROWS, digits)
    assert train(ROWS, digits).folder == run.folder
    assert train(ROWS, digits, seed=1).folder != run.folder
    assert train(ROWS[:-1], digits).folder != run.folder


def ask_once(assignment: Any) -> str:
    body = json.dumps({"model": "any", "messages": assignment.messages}).encode()
    with urllib.request.urlopen(f"{assignment.base_url}/v1/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_an_agent_plays_the_rows(train: Callable[..., rlvr.Run]) -> None:
    run = train(ROWS, digits, agent=ask_once)
    assert run.settings["env"]["name"] == "agent" and run.settings["env"]["kwargs"]["inner"] == "dataset"
    assert run.settings["training"]["optimizer"]["warmup_steps"] == 5, "of the config dataset, as without an agent"
    assert [row["env/all/stop/finished"] for row in run.metrics if row["phase"] == "rl"] == [1.0, 1.0]
    for wrong, words in ((7, "agent is of type int"), ({"play": 1}, "play")):
        with pytest.raises(ValueError, match=words):
            train(ROWS, digits, agent=wrong)
    with pytest.raises(ValueError, match="agent without data"):
        train(None, digits, agent=ask_once)


def test_a_run_that_is_interrupted_goes_on_by_the_same_call_to_the_same_bits(
    train: Callable[..., rlvr.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = train(ROWS, digits)
    step = TrainingLoop._rl_step  # pyright: ignore[reportPrivateUsage]

    def stop_after(loop: Any, number: int) -> Any:
        loop.stop_request.is_set = True  # as Ctrl-C does
        return step(loop, number)

    monkeypatch.setattr(TrainingLoop, "_rl_step", stop_after)
    with pytest.raises(KeyboardInterrupt):
        train(ROWS, digits, name="stopped")
    monkeypatch.undo()
    stopped = rlvr.load_run(calm.folder.parent / "stopped")
    assert not stopped.is_finished and len(stopped.metrics) == 1
    with pytest.raises(ValueError, match="is not finished"):
        _ = stopped.summary
    assert stopped.resume(quiet=True).summary["weights_sha256"] == calm.summary["weights_sha256"]
    assert train(ROWS, digits, name="stopped").folder == stopped.folder


class Table:
    """As a DataFrame of pandas."""

    columns = ("prompt", "answer")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [dict(row) for row in ROWS]


def read_rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize("given", [read_rows, Table, lambda: tuple(ROWS), lambda: {"train": ROWS}])
def test_rows_come_in_many_forms_and_are_the_same_data(given: Callable[[], Any], tmp_path: Path) -> None:
    expected = settings_of(tmp_path, data=ROWS)
    assert settings_of(tmp_path, data=given()) == expected
    source = rlvr.resolve_environment("dataset", path=expected["env.kwargs.path"])
    assert source.size is not None and source.size("") + len(source.heldout(None)) == len(ROWS)


def test_a_data_set_of_hugging_face_and_its_test_split_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    whole = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS[:30]), test=datasets.Dataset.from_list(ROWS[30:])
    )
    values = settings_of(tmp_path, data=whole)
    assert values == settings_of(tmp_path, data=ROWS[:30], heldout=ROWS[30:])


def test_texts_files_and_environments_are_data(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert settings_of(tmp_path, data=file)["env.kwargs.path"] == str(file)
    assert settings_of(tmp_path, data="rpn_arithmetic") == {"run.root": str(tmp_path), "env.name": "rpn_arithmetic"}
    made = {"name": "rpn_arithmetic", "kwargs": {"complexity": [1, 2]}}
    assert settings_of(tmp_path, data=made)["env.kwargs.complexity"] == [1, 2]
    assert settings_of(tmp_path, data="openai/gsm8k")["env.kwargs.name"] == "openai/gsm8k"
    assert Path(settings_of(tmp_path, data=["Say hello"])["env.kwargs.path"]).read_text() == '{"prompt": "Say hello"}\n'


def test_a_task_source_is_data(train: Callable[..., rlvr.Run], tmp_path: Path) -> None:
    source = dataset(settings_of(tmp_path, data=ROWS)["env.kwargs.path"])
    assert train(source, digits).settings["env"]["name"].startswith("given:RowSource_")


def make_reward(goal: int) -> Callable[..., float]:
    return lambda prompt, response, meta: float(len(response) == goal)


class Counter:
    def __init__(self, goal: int) -> None:
        self.goal, self.calls = goal, 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += len(completions)
        return [float(len(text) > self.goal) for text in completions]


def test_functions_of_the_program_and_objects_with_a_state_are_rewards(train: Callable[..., rlvr.Run]) -> None:
    made = make_reward(3)
    assert train(ROWS, made).settings["reward"]["type"].startswith("given:lambda_")
    counter = Counter(2)
    train(ROWS, counter)
    assert counter.calls >= 2 * 2 * 4
    run = train(ROWS, [(digits, 1.0), (make_reward(2), 0.5), "exact_match"])
    assert {"rewards/digits/mean", "reward"} <= run.metrics[-1].keys() or run.metrics[-1]["reward"] >= 0


class Base:
    weight = 1.0

    def score(self, response: str) -> float:
        return self.weight


def _closure(held: Any) -> Callable[..., float]:
    return lambda prompt, response, meta: float(response in held)


def _with_default(held: Any) -> Callable[..., float]:
    def judge(prompt: str, response: str, meta: Any, *, words: Any = held) -> float:
        return float(response in words)

    return judge


def _with_global(value: float) -> Callable[..., float]:
    names: dict[str, Any] = {}
    exec(f"TABLE = {{'v': {value}}}\ndef judge(prompt, response, meta):\n    return TABLE['v']", names)
    return names["judge"]


def _with_helper(value: float) -> Callable[..., float]:
    names: dict[str, Any] = {}
    exec(f"def helper():\n    return {value}\ndef judge(prompt, response, meta):\n    return helper()", names)
    return names["judge"]


def _attribute(value: Any) -> Any:
    made = Counter(1)
    made.held = value  # type: ignore[attr-defined]
    return made


def _child(value: float) -> Any:
    return type("Child", (type("Base", (Base,), {"weight": value}),), {"__call__": Base.score})()


def _with_metadata(value: float) -> Any:
    made = dataclass(type("Scaled", (Base,), {"__annotations__": {"by": float}, "by": field(metadata={"at": value})}))
    return made(1.0)


DIFFERENT: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a list in a closure": (_closure, ["a"], ["b"]),
    "a dict in a closure": (_closure, {"a": 1}, {"a": 2}),
    "a function in a closure": (_closure, make_reward(1), make_reward(2)),
    "a keyword default": (_with_default, ["a"], ["b"]),
    "keywords of a partial": (lambda weight: partial(digits, weight=weight), 1.0, 0.25),
    "a constant of the program": (_with_global, 1.0, 0.25),
    "a helper": (_with_helper, 1.0, 0.25),
    "an attribute that is a list": (_attribute, [1], [2]),
    "an attribute of a base class": (_child, 1.0, 2.0),
    "a number": (make_reward, 3, 4),
    "the metadata of a dataclass": (_with_metadata, 1.0, 2.0),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_the_path_of_an_object_follows_what_it_computes(kind: str) -> None:
    make, one, other = DIFFERENT[kind]
    first, again, second = make(one), make(one), make(other)
    assert name_object(first) == name_object(again) != name_object(second)
    assert load_object("reward", name_object(second)) is second


def test_an_object_keeps_its_path_and_what_cannot_be_described_is_never_taken_for_another() -> None:
    assert name_object(digits) == "tests.runs.test_library:digits"
    counter = Counter(1)
    before = name_object(counter)
    counter.calls = 100
    assert name_object(counter) == before
    assert load_object("reward", name_object(reward := make_reward(5))) is reward
    generators = [_closure(iter([1])), _closure(iter([1]))]
    assert len({name_object(one) for one in generators}) == 2
    with pytest.raises(ValueError, match="was given as an object by a Python program, and is not in this process"):
        load_object("reward", "given:lambda_00000000")


PROGRAM = """
LIMIT, CALLS, SEEN = 3, 0, []
def helper(text):
    return len(text)
def judge(prompt, response, meta):
    global CALLS
    CALLS += 1
    SEEN.append(response)
    return float(helper(response) > LIMIT)
"""


@pytest.mark.parametrize("change", ["LIMIT = 4", "def helper(text):\n    return 2 * len(text)"])
def test_a_function_whose_program_changed_has_another_path(change: str) -> None:
    program: dict[str, Any] = {}
    exec(PROGRAM, program)
    before = name_object(judge := program["judge"])
    judge("", "long enough", {})  # its own state
    exec("def helper(text):\n    return len(text)", program)  # the same cell of a notebook again
    assert name_object(judge) == before
    exec(change, program)
    after = name_object(judge)
    assert after != before and name_object(judge) == after
    assert load_object("reward", before) is judge is load_object("reward", after)


def test_a_message_names_a_function_as_the_program_does(train: Callable[..., rlvr.Run]) -> None:
    def needs_more(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return meta["not there"]

    with pytest.raises(ValueError, match=r"reward 'needs_more' raised KeyError: .* in needs_more at") as caught:
        train(ROWS, needs_more)
    assert "given:" not in str(caught.value)


def test_the_plan_and_a_stop_name_a_function_as_the_program_does(
    train: Callable[..., rlvr.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    def says(prompt: str, response: str, meta: dict[str, Any]) -> Any:
        return "yes"

    with pytest.raises(TrainingStoppedError, match=r"the reward 'says' gave no verdict") as caught:
        train(ROWS, says, quiet=False)
    shown = capsys.readouterr().out
    assert re.search(r"reward +says\n", shown) and "given:" not in shown + str(caught.value)


def test_two_rewards_of_one_function_are_two(model: Path) -> None:
    def make(value: float) -> Callable[..., float]:
        return lambda prompt, response, meta: [value][0]

    result = rlvr.evaluate(model, ROWS[:2], [(make(1.0), 1.0), (make(0.0), 1.0)], samples=2, max_tokens=1, quiet=True)
    assert result["mean_reward"]["value"] == 0.5


def test_a_reward_may_change_the_meta_of_its_task(train: Callable[..., rlvr.Run]) -> None:
    seen: list[bool] = []

    def pops(prompt: str, response: str, meta: dict[str, Any]) -> float:
        seen.append(meta.pop("answer", None) is not None)
        return 0.5

    train(ROWS, pops)
    assert all(seen) and len(seen) > 10


def test_rows_need_no_answer_where_a_reward_is_given(train: Callable[..., rlvr.Run], model: Path) -> None:
    assert train([row["prompt"] for row in ROWS], digits).is_finished
    assert train([{"prompt": row["prompt"], "target": "1"} for row in ROWS], digits).is_finished
    assert rlvr.evaluate(model, ["a", "b", "b"], digits, samples=2, max_tokens=2, quiet=True)["tasks"] == 2


def test_a_missing_value_of_pandas_is_none(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b", "note": float("nan")}]
    assert '"note": null' in Path(settings_of(tmp_path, data=rows)["env.kwargs.path"]).read_text()


def test_the_path_of_an_object_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "from rlvr.core.registry import name_object\n"
        "def close(p, r, m, /, allowed=('a', 'b')):\n    return r in {'yes', 'no', 'perhaps'} and r in allowed\n"
        "print(name_object(close), name_object(lambda p, r, m: close(p, r, m)))"
    )
    (script := tmp_path / "script.py").write_text(code)
    said = {
        subprocess.run(
            [sys.executable, script], capture_output=True, check=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1 and said.pop().startswith("given:close_")


def test_settings_are_objects_mappings_or_short_names(tmp_path: Path) -> None:
    given = settings_of(
        tmp_path, "./model", lora=rlvr.LoraConfig(rank=4), optimizer=AdamW(learning_rate=0.1, decay="linear"),
        training={"gap_stop": 0.5}, num_generations=4, client="mock", algorithm="grpo", schedule="fixed_lag",
        rollout=rlvr.SamplingParams(temperature=0.7),
    )  # fmt: skip
    assert given.items() >= {
        "run.root": str(tmp_path), "model.name": "./model", "model.lora.rank": 4, "training.optimizer.name": "adamw",
        "training.optimizer.learning_rate": 0.1, "training.optimizer.decay": "linear", "training.gap_stop": 0.5,
        "num_generations": 4, "client": "mock", "algorithm.name": "grpo", "training.schedule": "fixed_lag",
        "rollout.temperature": 0.7,
        "training.optimizer.warmup_steps": 0,  # of an object what is not given counts too: a config has others
    }.items()  # fmt: skip
    rates = settings_of(tmp_path, learning_rate=0.2, optimizer=AdamW(decay="linear"))
    assert rates["training.optimizer.learning_rate"] == 0.2


def test_an_objects_defaults_count_over_those_of_the_config(train: Callable[..., rlvr.Run]) -> None:
    run = train(ROWS, digits, optimizer=AdamW(decay="linear"))
    assert run.settings["training"]["optimizer"]["warmup_steps"] == 0  # the config `dataset` has 5
    assert run.settings["training"]["optimizer"]["learning_rate"] == 1e-3  # a short name comes before it


def test_functions_in_the_options_of_an_environment_have_a_path(tmp_path: Path) -> None:
    def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    options = {"inner": "toy", "tools": [double, {"name": "python", "kwargs": {"seconds": 5}}], "calls": {}}
    values = settings_of(tmp_path, data={"name": "tools", "kwargs": options})
    named, given = values["env.kwargs.tools"]
    assert load_path("tools", named)(4) == 8 and given == {"name": "python", "kwargs": {"seconds": 5}}
    json.dumps(values)  # a config holds it


def test_settings_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.steps is given twice, as 2 and 1"):
        settings_of(tmp_path, steps=2, training={"steps": 1})
    with pytest.raises(ValueError, match=r"evaluate: evaluation\.tasks is given twice"):
        settings_of(tmp_path, function="evaluate", tasks=2, evaluation={"tasks": 1})


def test_a_model_of_transformers_is_trained_with_its_weights(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    values = settings_of(tmp_path, loaded)
    saved = Path(values["model.name"])
    assert settings_of(tmp_path, loaded) == values and (saved / "tokenizer.json").exists()
    run = rlvr.train(loaded, ROWS, digits, root=tmp_path, **{**SHORT, "steps": 1})
    by_name = rlvr.train(model, ROWS, digits, root=tmp_path, **{**SHORT, "steps": 1})
    assert run.summary["weights_sha256"] == by_name.summary["weights_sha256"]


def test_a_configuration_is_a_model_of_random_weights(model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    values = settings_of(tmp_path, config)
    assert values["model.config"]["model_type"] == "qwen2" and values["model.name"] is None
    run = rlvr.train(config, ROWS, digits, tokenizer=str(model), root=tmp_path, **{**SHORT, "lora": None, "steps": 1})
    assert run.is_finished


def test_a_run_and_a_model_are_evaluated(train: Callable[..., rlvr.Run], model: Path) -> None:
    run = train(ROWS, digits)
    assert run.evaluate(samples=3, quiet=True)["samples"] == 3
    assert rlvr.evaluate(run, seed=5, quiet=True)["seed"] == 5
    of_model = rlvr.evaluate(model, ROWS[:4], digits, samples=2, max_tokens=4, quiet=True)
    assert of_model["tasks"] == 4 and 0 <= of_model["mean_reward"]["value"] <= 1
    assert rlvr.evaluate(model, like=run, samples=2, quiet=True)["like"] == str(run.folder)
    with pytest.raises(ValueError, match="evaluate: unknown argument 'steps'"):
        rlvr.evaluate(model, ROWS, digits, steps=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="expected the path of a folder"):
        rlvr.load_run(run)  # type: ignore[arg-type]


class Saved:
    def save_pretrained(self, folder: str) -> None: ...


@dataclass
class Wrapped:
    peft_config: Any = None


class NotAModel:
    pass


class Empty(Saved):
    """A model that was made on the device meta."""

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"head": torch.empty(2, device="meta")}


def test_a_mistake_in_evaluate_names_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^evaluate: data is of type int"):
        rlvr.evaluate(tmp_path, data=5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": iter(())}, "data has no rows; a generator gives them once"),
        ({"data": [{"prompt": "a", "answer": "b"}, 3]}, "row 2 of data is of type int, expected a mapping"),
        ({"data": [{"prompt": "a", "answer": object()}]}, "row 1 of data: a value of type object"),
        ({"data": [{"question": "a"}, {"other": "b"}]}, "line 2: the field 'question' is missing"),
        ({"data": 3}, "data is of type int; expected rows"),
        ({"data": "./nothing.jsonl"}, "is no file or folder here and no environment"),
        ({"data": "rpn_arithmetics"}, "did you mean 'rpn_arithmetic'"),
        ({"heldout": ROWS}, "heldout without data"),
        ({"data": ROWS, "reward": 3}, "a reward is of type int; expected a function"),
        ({"data": ROWS, "reward": [(digits, "much")]}, "the weight 'much', expected a number"),
        ({"data": ROWS, "reward": "exact_mach"}, "did you mean 'exact_match'"),
        ({"data": ROWS, "model": Wrapped()}, "wrapped by peft"),
        ({"data": ROWS, "model": Empty()}, r"model has no weights \(head is on the device meta\)"),
        ({"data": ROWS, "model": NotAModel()}, "model is of type NotAModel; expected a name or folder"),
        ({"data": ROWS, "model": {"hidden_size": 3}}, "a mapping without model_type"),
        ({"data": {"train": ROWS, "eval": ROWS}}, "of which 'eval' is unknown; expected 'train' and perhaps one of"),
        ({"data": {}}, "data has the parts none"),
        ({"data": [{"prompt": "\ud800", "answer": "b"}]}, "row 1 of data: 'utf-8' codec"),
        ({"data": ROWS, "reward": Counter}, r"the reward Counter is a class; give an object of it: Counter\(\)"),
        ({"data": ROWS, "client": object()}, "client is of type object; expected text, a number"),
        ({"data": ROWS, "tokenizer": Saved()}, r"model\.tokenizer is an object; give the folder of it"),
        ({"data": ROWS, "name": ""}, "name='', expected text"),
        ({"data": ROWS, "root": "/proc/none"}, "root='/proc/none': .*give another root"),
        ({"data": ROWS, "step": 3}, "unknown argument 'step' .did you mean 'steps'"),
        (
            {"data": ROWS, "max_tokens": None},
            r"rollout.max_tokens is missing.*is the argument max_tokens",
        ),
        ({"data": ROWS, "tokenizer": "./none"}, r"model.tokenizer=./none: no such folder.*is the argument tokenizer"),
        ({"data": ROWS, "lr": 1e-5}, "unknown argument 'lr' .did you mean 'learning_rate'"),
        ({"data": ROWS, "reward_funcs": [digits]}, "unknown argument 'reward_funcs' .did you mean 'reward'"),
        ({"train_dataset": ROWS}, "unknown argument 'train_dataset' .did you mean 'data'"),
        ({"data": ROWS, "optim": "lion"}, "optim=lion .from rlvr.train.*the optimizer is AdamW"),
        ({"data": ROWS, "steps": "three"}, r'training.steps: "three" .text. given .from rlvr.train\(...\).'),
        ({"data": ROWS, "training": {"stepz": 3}}, r"unknown key training.stepz \(from rlvr.train"),
        ({"data": ROWS, "optimizer": {"name": "muon"}}, "name=muon needs matrix_learning_rate"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_was_given(
    given: Mapping[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        rlvr.train(**{"model": model, "reward": digits, "root": tmp_path, **SHORT, **given})
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_texts_with_a_dollar_are_no_references(train: Callable[..., rlvr.Run], tmp_path: Path) -> None:
    values = settings_of(tmp_path, data="rpn_arithmetic", reward={"type": "keyword_contains"})
    assert values["reward.type"] == "keyword_contains"
    run = rlvr.train(
        data={"name": "toy"}, reward={"type": "keyword_contains", "kwargs": {"keywords": ["${x}"]}}, client="mock",
        steps=1, root=tmp_path, quiet=True, max_tokens=4,
    )  # fmt: skip
    assert rlvr.load_run(run.folder).resume(quiet=True).is_finished


def test_a_run_with_more_steps_goes_on_to_the_bits_of_a_run_that_had_them(train: Callable[..., rlvr.Run]) -> None:
    whole = train(ROWS, digits, steps=4)
    short = train(ROWS, digits, steps=2, name="grown")
    grown = train(ROWS, digits, steps=4, name="grown")
    assert grown.folder == short.folder and grown.summary["weights_sha256"] == whole.summary["weights_sha256"]
    same = ("phase", "step", "reward", "loss")
    assert [[row.get(key) for key in same] for row in grown.metrics] == [
        [row.get(key) for key in same] for row in whole.metrics
    ]
    assert (grown.folder / "summary-2-steps.json").exists()
    assert train(ROWS, digits, steps=4, name="grown").is_finished
    with pytest.raises(ValueError, match=r"differs in training\.steps"):
        train(ROWS, digits, steps=3, name="grown")


def test_an_interrupted_run_takes_more_steps_too(
    train: Callable[..., rlvr.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(ROWS, digits, steps=3)
    step = TrainingLoop._rl_step  # pyright: ignore[reportPrivateUsage]

    def stop_after(loop: Any, number: int) -> Any:
        loop.stop_request.is_set = True
        return step(loop, number)

    monkeypatch.setattr(TrainingLoop, "_rl_step", stop_after)
    with pytest.raises(KeyboardInterrupt):
        train(ROWS, digits, steps=2, name="stopped")
    monkeypatch.undo()
    grown = train(ROWS, digits, steps=3, name="stopped")
    assert grown.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer": AdamW(learning_rate=1e-3, decay="linear")}, "learning rate depends on the number of steps"),
        ({"optimizer": AdamW(learning_rate=1e-3, warmup_steps=0.5)}, "learning rate depends on the number of steps"),
        ({"schedule": "fixed_lag"}, "schedule=fixed_lag has sampled nothing for them"),
        ({"seed": 1}, r"differs in seed, training\.steps|differs in training\.steps, seed"),
    ],
)
def test_a_run_that_would_be_another_with_more_steps_is_refused(
    more: Mapping[str, Any], message: str, train: Callable[..., rlvr.Run]
) -> None:
    settings = {key: value for key, value in more.items() if key != "seed"}
    rates = {"learning_rate": 1e-3} if "optimizer" not in more else {}
    short = {key: value for key, value in SHORT.items() if key not in ("learning_rate", "steps")}
    model, root = train.args[0], train.keywords["root"]  # type: ignore[attr-defined]
    run = rlvr.train(model, ROWS, digits, root=root, name="grown", steps=1, **short, **rates, **settings)
    with pytest.raises(ValueError, match=message):
        rlvr.train(model, ROWS, digits, root=root, name="grown", steps=2, **short, **rates, **{**settings, **more})
    assert run.is_finished


def test_a_run_that_ended_before_its_last_step_takes_no_more_steps(train: Callable[..., rlvr.Run]) -> None:
    passes: dict[str, Any] = {"reward": lambda prompt, response, meta: 1.0, "name": "early", "evaluate_every": 1}
    run = train(ROWS, training={"until": 0.5}, steps=3, **passes)
    assert len(run.metrics) == 1
    with pytest.raises(ValueError, match="it ended before its last step"):
        train(ROWS, training={"until": 0.5}, steps=4, **passes)


BROKEN: dict[str, Callable[..., Any]] = {
    "KeyError: 'gold' on the first task": lambda prompt, response, meta: meta["gold"],
    "meta has 'answer'": lambda prompt, response, meta: meta["gold"],
    "messages where a row's prompt is a list": lambda completions, **columns: [
        c[0]["content"] == "" for c in completions
    ],
    "NameError: name 'nothing' is not defined": lambda prompt, response, meta: nothing,  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_mistake_in_a_reward_is_named_before_the_model_is_loaded(
    message: str, train: Callable[..., rlvr.Run], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(ROWS, BROKEN[message])
    assert not list((tmp_path / "runs").glob("*/resolved.yaml"))


def test_a_reward_that_fails_on_a_completion_alone_is_no_mistake(train: Callable[..., rlvr.Run]) -> None:
    def parses(prompt: str, response: str, meta: dict[str, Any]) -> float:
        import re

        return float(re.fullmatch(r"no (such) text", response).group(1))  # type: ignore[union-attr]

    with pytest.raises(TrainingStoppedError, match="NoneType"):
        train(ROWS, parses)


def test_rows_that_are_there_twice_count_once_among_the_held_out(tmp_path: Path) -> None:
    source = rlvr.resolve_environment("dataset", path=str(settings_of(tmp_path, data=ROWS + ROWS)["env.kwargs.path"]))
    once = rlvr.resolve_environment("dataset", path=str(settings_of(tmp_path, data=ROWS)["env.kwargs.path"]))
    assert len(source.heldout(None)) == len(once.heldout(None))
    (said,) = [text for text in source.advice() if "copies of others" in text]
    assert said.startswith(f"{len(once.heldout(None))} held-out rows are copies")


def test_functions_of_a_program_have_their_own_names_in_metrics(tmp_path: Path) -> None:
    def has(word: str) -> Callable[..., float]:
        def close(prompt: str, response: str, meta: dict[str, Any]) -> float:
            return float(word in response)

        return close

    toy: dict[str, Any] = {
        "data": "toy", "client": "mock", "steps": 1, "max_tokens": 8, "evaluation": {"tasks": 2, "samples": 1},
        "root": tmp_path, "quiet": True,
    }  # fmt: skip
    run = rlvr.train(reward=[(has("answer"), 1.0), (has("solution"), 0.5), (has("."), 0.5)], **toy)
    assert {f"rewards/composite/{name}/mean" for name in ("close", "close_2", "close_3")} <= set(run.metrics[0])
    watched = {"type": "keyword_contains", "kwargs": {"keywords": ["a"]}, "watch": [has("answer"), has("solution")]}
    run = rlvr.train(reward=watched, **toy)
    assert set(run.rollouts()[0]["scores"]) == {"keyword_contains", "close", "close_2"}
    assert {"watched/close", "watched/close_2"} <= set(run.summary["final"])
    run = rlvr.train(reward=has("answer"), **toy)
    assert list(run.rollouts()[0]["scores"]) == ["close"] and "given" not in str(run.metrics)


def test_a_function_with_the_name_of_a_reward_is_not_taken_for_it(tmp_path: Path) -> None:
    def length(prompt: str, response: str, meta: dict[str, Any]) -> float:
        return 1.0

    values = settings_of(tmp_path, data="toy", reward=rlvr.resolve_reward(length))
    assert values["reward.type"].startswith("given:length_")
