"""Row files: gsm8k and jsonl as task sources, epochs, held-out rows, and every way a file can be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlvr.core import rng
from rlvr.core.types import StopReason, Task, Trajectory
from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"


def write(path: Path, rows: list) -> str:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def capitals(n: int = 40) -> list[dict]:
    return [{"prompt": f"question {i}", "answer": f"a{i}", "kind": i % 3} for i in range(n)]


def test_every_row_comes_once_an_epoch_in_a_seeded_order(tmp_path):
    source = resolve_environment("jsonl", path=write(tmp_path / "d.jsonl", capitals()))
    n = source.size("")
    first = [source.train(1, i, "").id for i in range(n)]
    second = [source.train(1, i, "").id for i in range(n, 2 * n)]
    assert len(set(first)) == n and set(first) == set(second) and first != second
    assert [source.train(1, i, "").id for i in range(n)] == first
    assert [source.train(2, i, "").id for i in range(n)] != first


def test_a_row_becomes_a_task_with_its_other_columns_in_meta(tmp_path):
    rows = [
        {"q": "one?", "gold": 1, "hint": "x", "d": 2, "how": "count"},
        {"q": "ten?", "gold": 10, "d": 10, "how": "-"},
    ]
    path = write(tmp_path / "d.jsonl", rows)
    source = resolve_environment(
        "jsonl",
        path=path,
        heldout_fraction=0,
        prompt_field="q",
        answer_field="gold",
        level_field="d",
        demonstration_field="how",
        reward="gsm8k",
    )
    meta = {"answer": 1, "gold": 1, "hint": "x", "d": 2, "how": "count"}
    assert source.train(0, 5, "2") == Task("d.jsonl:1", "one?", meta, "2")
    assert source.levels == ("2", "10")  # by value, not by alphabet
    assert source.reward == "gsm8k" and source.heldout(None) == []
    assert source.demonstration(source.train(0, 0, "2"), 0) == "count"
    with pytest.raises(ValueError, match="level '3'; the levels are '2', '10'"):
        source.train(0, 0, "3")


def test_held_out_rows_are_a_fixed_share_and_equal_prompts_never_straddle(tmp_path):
    rows = capitals(300)
    source = resolve_environment("jsonl", path=write(tmp_path / "d.jsonl", rows + rows[::-1]))
    held = source.heldout(None)
    trained = {source.train(0, i, "").prompt for i in range(source.size(""))}
    assert 10 <= len(held) <= 50 and 2 * len(held) + source.size("") == 600  # of two equal held-out rows one is left
    assert not trained & {t.prompt for t in held}
    assert source.heldout(5) == held[:5]
    again = resolve_environment("jsonl", path=write(tmp_path / "e.jsonl", rows[::-1]))
    assert {t.prompt for t in again.heldout(None)} == {t.prompt for t in held}


def test_a_small_file_still_holds_out_one_prompt_and_trains_on_the_rest(tmp_path):
    for n in (2, 3, 5):
        for fraction in (0.001, 0.999):
            path = write(tmp_path / "d.jsonl", capitals(n))
            source = resolve_environment("jsonl", path=path, heldout_fraction=fraction)
            assert len(source.heldout(None)) >= 1 and source.size("") >= 1
    with pytest.raises(ValueError, match=r"has one prompt only, .*; set heldout_path"):
        resolve_environment("jsonl", path=write(tmp_path / "d.jsonl", capitals(1)))


def test_a_held_out_file_is_never_trained_on(tmp_path):
    rows = capitals()
    path, heldout = write(tmp_path / "d.jsonl", rows), write(tmp_path / "h.jsonl", rows[:10])
    source = resolve_environment("jsonl", path=path, heldout_path=heldout)
    assert source.size("") == 30 and len(source.heldout(None)) == 10
    assert {t.id for t in source.heldout(None)} == {f"heldout:h.jsonl:{i}" for i in range(1, 11)}
    with pytest.raises(ValueError, match="every training row is held out too"):
        resolve_environment("jsonl", path=path, heldout_path=path)


def test_messages_as_prompts_and_rewards_without_an_answer(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "d.jsonl", ["\n", {"prompt": chat}, "  \n", {"prompt": "hi"}])
    source = resolve_environment("jsonl", path=path, answer_field=None, heldout_fraction=0)
    assert sorted((source.train(0, i, "").prompt for i in range(2)), key=str) == [chat, "hi"]
    assert source.demonstration(source.train(0, 0, ""), 0) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"d\.jsonl has no rows; expected one JSON object a line"),
        (["\n\n"], "has no rows"),
        ([{"prompt": "a", "answer": "b"}, "{'prompt': 1}\n"], r"d\.jsonl, line 2: not JSON .*expected one JSON object"),
        (["[1]\n"], r"row 1: a JSON int, expected an object"),
        (["[" * 100_000 + "\n"], "d.jsonl: not JSON"),
        (
            [{"prompt": "a", "answer": "b"}, {"Prompt": "a"}],
            r"line 2: the field 'prompt' is missing \(did you mean 'Prompt'",
        ),
        (
            [{"prompt": "a", "answr": "b"}],
            r"line 1: the field 'answer' is missing \(did you mean 'answr'\?\).*set env.kwargs.answer_field",
        ),
        ([{"prompt": "a", "answer": None}], "line 1: the field 'answer' is null"),
        ([{"prompt": "", "answer": "b"}], "line 1: 'prompt' is '', expected text or a list"),
        ([{"prompt": [{"text": "a"}], "answer": "b"}], "line 1: 'prompt' is .*expected text or a list"),
        (['{"prompt": "\\ud800", "answer": "b"}\n'], "line 1: holds a lone surrogate"),
        ([{}], "the row has no fields"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        resolve_environment("jsonl", path=write(tmp_path / "d.jsonl", rows))


def test_a_bad_file_is_named(tmp_path):
    write(tmp_path / "train.jsonl", capitals())
    with pytest.raises(ValueError, match=r"trian\.jsonl does not exist \(did you mean 'train\.jsonl'\?\)"):
        resolve_environment("jsonl", path=str(tmp_path / "trian.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: not UTF-8"):
        resolve_environment("jsonl", path=str(tmp_path / "latin.jsonl"))
    (tmp_path / "bom.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n{"prompt": "c", "answer": "d"}'
    )
    assert len(resolve_environment("jsonl", path=str(tmp_path / "bom.jsonl")).heldout(None)) == 1
    with pytest.raises(ValueError, match="heldout_fraction=2"):
        resolve_environment("jsonl", path=str(tmp_path / "train.jsonl"), heldout_fraction=2)


def gsm8k_folder(tmp_path: Path) -> str:
    for split, n in (("train", 6), ("test", 3)):
        rows = [{"question": f"{split} {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(n)]
        write(tmp_path / f"{split}.jsonl", rows)
    return str(tmp_path)


def test_gsm8k_from_a_folder(tmp_path):
    source = resolve_environment("gsm8k", path=gsm8k_folder(tmp_path))
    assert (source.levels, source.reward, source.size("")) == (("",), "gsm8k", 6)
    task = source.train(0, 0, "")
    assert task.prompt.startswith("Question: train ") and task.prompt.endswith("?\nAnswer:")
    demonstration = source.demonstration(task, 0)
    assert demonstration == " " + task.meta["answer"]
    assert resolve_reward("gsm8k")(task.prompt, demonstration, task.meta) == 1.0
    held = source.heldout(2)
    assert held == source.heldout(None)[:2] and all(t.id.startswith("gsm8k-test-") for t in held)
    assert len(source.heldout(None)) == 3
    steps = "He buys 2+2=<<2+2=4>>4.\n\nThat is <<4*3=12>>12.\n#### 12"
    assert source.describe_task(task) == {"solution steps": "1"}
    assert source.describe_task(Task("", "", {"answer": steps})) == {"solution steps": "2"}


def test_a_row_is_described_by_its_short_columns(tmp_path):
    source = resolve_environment("jsonl", path=write(tmp_path / "d.jsonl", capitals()))
    task = source.train(0, 0, "")
    assert source.describe_task(task) == {"answer": task.meta["answer"], "kind": str(task.meta["kind"])}
    long = {"text": "x" * 41, "list": [1], "share": 0.5, "empty": "", **{f"c{i}": "a" for i in range(9)}}
    assert source.describe_task(Task("", "", long)) == {f"c{i}": "a" for i in range(8)}


def test_gsm8k_template(tmp_path):
    path = gsm8k_folder(tmp_path)
    source = resolve_environment("gsm8k", path=path, template="{{x}} {question}\n")
    assert source.train(0, 0, "").prompt.startswith("{x} train ")
    assert source.demonstration(source.train(0, 0, ""), 0).startswith("It is")
    for bad in ("no field", "{question} {answer}", "{question", "{0}"):
        with pytest.raises(ValueError, match="gsm8k: template="):
            resolve_environment("gsm8k", path=path, template=bad)


def test_gsm8k_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"train\.jsonl does not exist"):
        resolve_environment("gsm8k", path=str(tmp_path))
    path = gsm8k_folder(tmp_path)
    write(tmp_path / "test.jsonl", [{"question": "q", "answer": "#### 1"}, {"question": "q"}])
    with pytest.raises(ValueError, match=r"test\.jsonl:2: the field 'answer' is missing"):
        resolve_environment("gsm8k", path=path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'rlvr\[data\]', or set env.kwargs.path=<folder with train"):
        resolve_environment("gsm8k")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside the project")
def test_gsm8k_on_the_real_files():
    source = resolve_environment("gsm8k", path=str(GSM8K))
    assert (source.size(""), len(source.heldout(None))) == (7473, 1319)
    tasks = source.heldout(50) + [source.train(0, i, "") for i in range(50)]
    answers = [
        Trajectory(t.prompt_text, [1], source.demonstration(t, 0) or "", [2], task=t, stop_reason=StopReason.STOP)
        for t in tasks
    ]
    assert [s.value for s in resolve_reward("gsm8k").score(answers)] == [1.0] * 100


def test_draws_that_go_from_level_to_level_sort_each_epoch_once(tmp_path, monkeypatch):
    rows = [{"prompt": f"q{i}", "answer": 1, "level": i % 12} for i in range(48)]
    path = write(tmp_path / "d.jsonl", rows)
    source = resolve_environment("jsonl", path=path, heldout_fraction=0, level_field="level")
    permutation, sorted_keys = rng.permutation, []
    monkeypatch.setattr(rng, "permutation", lambda n, key: sorted_keys.append(key) or permutation(n, key))
    drawn = [source.train(1, i, level).id for i in range(8) for level in source.levels]  # two epochs of four
    assert len(sorted_keys) == 2 * 12 and sorted(drawn[:48]) == sorted(drawn[48:])


def test_rows_that_are_all_held_out_are_a_test_set(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    source = resolve_environment("dataset", path=str(file), heldout_fraction=1)
    assert len(source.heldout(None)) == 2 and not source.levels
