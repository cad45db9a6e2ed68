"""Agents for the tests of environment `agent`: functions that talk to their model by HTTP, as programs do."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from rlvr.envs.agent.agent_run import Assignment


def post(assignment: Assignment, messages: list[Any], seconds: float = 30.0, **more: Any) -> dict[str, Any]:
    """The answer of one call; {"status", "error"} for one that is refused."""
    body = json.dumps({"model": assignment.model, "messages": messages, **more}).encode()
    request = urllib.request.Request(
        f"{assignment.base_url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def ask(assignment: Assignment, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The assistant's message, which is appended to the messages."""
    message = post(assignment, messages, **more)["choices"][0]["message"]
    messages.append(message)
    return message


def once(assignment: Assignment) -> None:
    ask(assignment, [{"role": "user", "content": assignment.prompt}])


async def twice(assignment: Assignment) -> str:
    """Asks, doubts, and says what it takes for the answer."""
    messages = [{"role": "user", "content": assignment.prompt}]
    ask(assignment, messages)
    messages.append({"role": "user", "content": "Sure?"})
    return "it says: " + ask(assignment, messages)["content"]


def silent(assignment: Assignment) -> None:
    """Never calls."""


def breaks(assignment: Assignment) -> None:
    once(assignment)
    raise RuntimeError("out of luck")


def forgets(assignment: Assignment) -> None:
    """A history that is written anew for the second call, and a third that goes on from the first."""
    messages = [{"role": "user", "content": assignment.prompt}]
    ask(assignment, messages)
    ask(assignment, [{"role": "user", "content": "Another matter."}])
    messages.append({"role": "user", "content": "Back."})
    ask(assignment, messages)


def asks_again(assignment: Assignment) -> None:
    """The same question twice; the second answer counts."""
    ask(assignment, [{"role": "user", "content": assignment.prompt}])
    ask(assignment, [{"role": "user", "content": assignment.prompt}])


def choices(assignment: Assignment) -> dict[str, Any]:
    answer = post(assignment, [{"role": "user", "content": assignment.prompt}], n=3)
    return {"answer": answer["choices"][2]["message"]["content"], "reward": 0.5, "metrics": {"seen": 3}}


def endless(assignment: Assignment) -> None:
    messages = [{"role": "user", "content": assignment.prompt}]
    while "status" not in (answer := post(assignment, messages)):
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]


def hangs(assignment: Assignment) -> None:
    once(assignment)
    time.sleep(60)


def invents(assignment: Assignment) -> None:
    """A history with a turn that the policy never took."""
    said = [{"role": "user", "content": assignment.prompt}, {"role": "assistant", "content": "invented"}]
    ask(assignment, [*said, {"role": "user", "content": "Go on."}])


def too_long(assignment: Assignment) -> str:
    refused = post(assignment, [{"role": "user", "content": "x " * 5_000}])
    ask(assignment, [{"role": "user", "content": assignment.prompt}])
    return f"{refused['status']} {refused['error']['message']}"


def leaves(assignment: Assignment) -> None:
    """Closes the connection of its first call before there is an answer, and asks again."""
    messages = [{"role": "user", "content": assignment.prompt}]
    with contextlib.suppress(TimeoutError, OSError):
        post(assignment, messages, seconds=0.05)
    time.sleep(1.5)  # the server looks twice a second
    ask(assignment, messages)


def in_parallel(assignment: Assignment) -> str:
    answers: list[Any] = []

    def call(number: int) -> None:
        answers.append(ask(assignment, [{"role": "user", "content": f"part {number}"}])["content"])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(sorted(answers))


def fan_out(assignment: Assignment, order: list[int]) -> None:
    """Parts that are asked for in some order, the last two alike, and one call that joins their answers."""
    answers = {
        number: ask(assignment, [{"role": "user", "content": f"part {number % 3}"}])["content"] for number in order
    }
    joined = [answers[0], answers[1], *sorted([answers[2], answers[5]])]
    ask(assignment, [{"role": "user", "content": f"{assignment.prompt} {joined}"}])


def refused_settings(assignment: Assignment) -> str:
    answer = post(assignment, [{"role": "user", "content": assignment.prompt}], logit_bias={"5": 100})
    once(assignment)
    return f"{answer['status']} {answer['error']['message']}"


def many_choices(assignment: Assignment) -> str:
    refused = post(assignment, [{"role": "user", "content": assignment.prompt}], n=4)
    once(assignment)
    return f"{refused['status']} {refused['error']['message']}"


def stops_once(assignment: Assignment) -> None:
    """Stop strings for the first call, and none for another."""
    post(assignment, [{"role": "user", "content": assignment.prompt}], stop=["b"])
    ask(assignment, [{"role": "user", "content": "Another matter."}])


def second_choice(assignment: Assignment) -> None:
    messages = [{"role": "user", "content": assignment.prompt}]
    answer = post(assignment, messages, n=3)
    messages += [answer["choices"][1]["message"], {"role": "user", "content": "Go on."}]
    ask(assignment, messages)


def leaves_last(assignment: Assignment) -> None:
    """Asks once, and leaves a second call before there is an answer."""
    once(assignment)
    with contextlib.suppress(TimeoutError, OSError):
        post(assignment, [{"role": "user", "content": "more"}], seconds=0.05)
    time.sleep(1.5)


def leaves_many(assignment: Assignment) -> None:
    """More calls than may wait at a time, all of which are left; then one that waits."""

    def leave() -> None:
        with contextlib.suppress(TimeoutError, OSError):
            post(assignment, [{"role": "user", "content": "more"}], seconds=0.05)

    for _ in range(7):
        threads = [threading.Thread(target=leave) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.8)
    once(assignment)


def stops_the_thread(assignment: Assignment) -> None:
    once(assignment)
    raise KeyboardInterrupt


def fork(assignment: Assignment) -> list[str]:
    """A first call, and two branches that go on from it; the ids of the three answers."""
    first = [{"role": "user", "content": assignment.prompt}]
    given = [post(assignment, first)]
    first.append(given[0]["choices"][0]["message"])
    given += [post(assignment, [*first, {"role": "user", "content": side}]) for side in ("left", "right")]
    return [answer["id"] for answer in given]


def forks(assignment: Assignment) -> None:
    fork(assignment)


def rewards_branches(assignment: Assignment) -> dict[str, Any]:
    """0.5 for the whole, and 1 for the first branch."""
    return {"reward": 0.5, "branches": {fork(assignment)[1]: 1.0}}


def posts_rewards(assignment: Assignment) -> None:
    """0.5 for the whole; 1 for what goes on from the first call, and 0 for the second branch."""
    root, _, right = fork(assignment)
    for given in ({"reward": 0.5}, {"reward": 1.0, "call": root}, {"reward": 0.0, "call": right}):
        body = json.dumps(given).encode()
        urllib.request.urlopen(urllib.request.Request(f"{assignment.base_url}/reward", body), timeout=30).close()


def rewards_a_stranger(assignment: Assignment) -> dict[str, Any]:
    return {"branches": {fork(assignment)[1] + "0": 1.0}}


def posts_a_strangers_reward(assignment: Assignment) -> str:
    request = urllib.request.Request(f"{assignment.base_url}/reward", b'{"reward": 1, "call": "no-such"}')
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.load(error)['error']['message']}"
    return "taken"
