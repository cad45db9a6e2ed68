"""Checks for answers that stand where the policy can read them: prompts, ids, tools, processes, the order of choices.

An answer may stand in a prompt by chance, or because it is to be found there. So own answers are counted against those
in the texts of other tasks, and a place that tells them is needed: a word such as "answer" before it, the end of
the prompt, a message that is not the question.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlvr.audits.environment.answer_texts import list_tools, write_call
from rlvr.audits.environment.check_report import CheckResult, CheckState, not_tried, report_share, sound
from rlvr.audits.environment.scripted_play import CheckedEnvironment, run_with_limit
from rlvr.core.futures import run_to_end
from rlvr.core.protocols import ClosableEnv
from rlvr.core.types import Task
from rlvr.envs.prompt import build_messages

MARKERS = "answer|solution|gold|label|expected|target|correct|truth|key|result|hint|reference"
CHANCE = 0.001  # the largest p-value that is no chance
MOST = 0.5  # share of tasks from which a place without a word for it tells the answer
OTHERS = 5  # texts of other tasks in which an answer is looked for
FEWEST = 20  # tasks with choices
CHOICES = ("choices", "options")
DIGESTS = ("md5", "sha1", "sha256", "sha512")  # that short answers can be guessed from
READS = ("{}", "cat {}", "print(open('{}').read())")  # what a tool that reads a path, a command or a program is given
MOST_READERS = 4
_CHOICE = re.compile(r"^\s*\(?([A-J])[).:]\s*(.+?)\s*$", re.MULTILINE)


def tail_probability(hits: int, tried: int, chance: float) -> float:
    """The binomial probability of at least `hits` hits, each with probability `chance`."""
    terms = (math.comb(tried, k) * chance**k * (1 - chance) ** (tried - k) for k in range(hits, tried + 1))
    return math.fsum(terms)


def holds_answer(text: str, answer: str) -> bool:
    """Whether the answer stands in the text as words of its own."""
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", text, re.IGNORECASE) is not None


def list_known(environment: CheckedEnvironment) -> list[tuple[Task, str]]:
    """Tasks with what they say is right."""
    tasks = [*environment.train, *environment.heldout]
    return [(task, answer) for task in tasks if (answer := environment.find_answer(task)) and len(answer) < 400]


def find_excess(
    known: Sequence[tuple[Task, str]], text_of: Callable[[Task], str], tells: Callable[[str, str], bool], least: float
) -> list[str]:
    """The tasks whose text tells their own answer, if they are more than chance and a share of at least `least`.

    Chance is how often the texts of other tasks tell the same answer."""
    hits, others, tried = list[str](), 0, 0
    texts = [text_of(task) for task, _ in known]
    for place, (_, answer) in enumerate(known):
        if not tells(texts[place], answer):
            continue
        hits.append(f"{answer[:40]!r} in {texts[place][-110:]!r}")
        for step in range(1, len(known)):
            other = (place + step) % len(known)
            if known[other][1].casefold() != answer.casefold():
                others, tried = others + tells(texts[other], answer), tried + 1
                if tried % OTHERS == 0:
                    break
    chance = max((others + 1) / (tried + 2), 0.02)
    is_rare = tail_probability(len(hits), len(known), chance) < CHANCE
    return hits if is_rare and len(hits) >= max(3, least * len(known)) else []


def check_prompts(environment: CheckedEnvironment) -> list[CheckResult]:
    """Whether prompts tell the answer: after a word for it, at an end, in another message, or encoded."""
    known = list_known(environment)
    if len(known) < 3:
        return [
            not_tried(name, "fewer than three tasks state an answer") for name in ("no_solution_leakage", "id_leakage")
        ]

    def follows_marker(text: str, answer: str) -> bool:
        return (
            re.search(rf"(?:{MARKERS})\W{{0,6}}(?:is|are|=)?\W{{0,6}}{re.escape(answer)}(?!\w|\.\d)", text, re.I)
            is not None
        )

    def stands_at_end(text: str, answer: str) -> bool:
        words = re.sub(r"[\s.:;)\]>]+$", "", text)
        is_there = words.endswith(answer) and words != answer and not re.match(r"[\w.]", words[: -len(answer)][-1:])
        return is_there or re.match(rf"\W*{re.escape(answer)}(?!\w|\.\d)", text) is not None

    def is_encoded(text: str, answer: str) -> bool:
        return any(form in text for form in encode_answer(answer)) or holds_digest(text, answer)

    places = (
        (_read_prompt, follows_marker, 0.0),
        (_read_prompt, stands_at_end, MOST),
        (_read_context, holds_answer, MOST),
        (_read_prompt, is_encoded, 0.0),
    )
    hits = list(dict.fromkeys(hit for place in places for hit in find_excess(known, *place)))
    results = [report_share("no_solution_leakage", hits[: len(known)], len(known), "prompts tell their answer")]
    if not hits and (anywhere := find_excess(known, _read_prompt, holds_answer, 0.9)):
        text = "prompts hold their answer: an extraction, or a leak"
        results.append(report_share("no_solution_leakage", anywhere, len(known), text, state=CheckState.WARNING))
    ids = find_excess(known, lambda task: task.id, lambda text, one: _split_id(text, one) or is_encoded(text, one), 0.3)
    return [*results, report_share("id_leakage", ids, len(known), "ids tell the answer of their task")]


def encode_answer(answer: str) -> list[str]:
    """Hexadecimal and base64 forms of an answer that is long enough to be told from chance."""
    data = answer.encode()
    return [data.hex(), base64.b64encode(data).decode().rstrip("=")] if len(data) >= 3 else []


def holds_digest(text: str, answer: str) -> bool:
    """Whether a plain hash of the answer stands in the text, or at least eight digits of its beginning."""
    runs = re.findall(r"(?<![0-9a-z])[0-9a-f]{8,128}(?![0-9a-z])", text.lower())
    digests = [hashlib.new(name, answer.encode(), usedforsecurity=False).hexdigest() for name in DIGESTS if runs]
    return any(digest.startswith(run) for run in runs for digest in digests)


def _split_id(text: str, answer: str) -> bool:
    return re.search(rf"(?<![^\W_]){re.escape(answer)}(?![^\W_])", text, re.IGNORECASE) is not None


def _read_prompt(task: Task) -> str:
    return str(build_messages(task.prompt)[-1].get("content", ""))


def _read_context(task: Task) -> str:
    """The messages before the last one."""
    return "\n".join(str(message.get("content", "")) for message in build_messages(task.prompt)[:-1])


def check_containment(environment: CheckedEnvironment) -> list[CheckResult]:
    """Whether tools, their results and variables of the process tell the answer."""
    known = list_known(environment)[:12]
    tools = {task.id: list_tools(environment, task) for task, _ in known}
    if len(known) < 3:
        return [not_tried("oracle_containment", "fewer than three tasks state an answer")]
    described = find_excess(known, lambda task: json.dumps(tools[task.id], default=str), holds_answer, 0.0)
    variables = {task.id: _read_variables(environment, task) for task, _ in known}
    exposed = find_excess(known, lambda task: variables[task.id], holds_answer, 0.0)
    free = [tool for tool in tools[known[0][0].id] if not (tool.get("parameters") or {}).get("required")]
    told: list[str] = []
    for tool in free[:8]:
        played = environment.play([(task, (write_call(tool), "done")) for task, _ in known])
        said = {one.task.id: one.observations[-1] for one in played if len(one.observations) > 1}
        heard = [pair for pair in known if pair[0].id in said]
        told += find_excess(heard, lambda task: said[task.id], holds_answer, MOST)  # noqa: B023 (called at once)
    files = {task.id: _read_files(environment, task, tools[task.id]) for task, _ in known}
    read = find_excess(known, lambda task: files[task.id], holds_answer, MOST)
    hits = [
        f"{where}: {hit}"
        for where, found in (("schema", described), ("process", exposed), ("result", told), ("file", read))
        for hit in found
    ]
    tried = len(known) * (3 + len(free))
    return [report_share("oracle_containment", hits, tried, "tools or processes tell the answer")]


def _read_variables(environment: CheckedEnvironment, task: Task) -> str:
    """The variables of this process that an episode of the task sets, which processes of its tools inherit."""
    before = dict(os.environ)

    async def begin() -> str:
        env = environment.source.env(task, environment.tokenizer)
        try:
            await env.initial_observation()
            return "\n".join(f"{name}={value}" for name, value in os.environ.items() if before.get(name) != value)
        finally:
            if isinstance(env, ClosableEnv):
                await env.close()

    if environment.source.group_builder:
        return ""
    with suppress(Exception):  # its failures are found elsewhere
        return run_to_end(begin())
    return ""


def _read_files(environment: CheckedEnvironment, task: Task, tools: Sequence[Mapping[str, Any]]) -> str:
    """What tools of one text read of files that an episode of the task makes at its beginning. A file that the prompt
    names is there to be read."""
    readers = [tool for tool in tools if len((tool.get("parameters") or {}).get("required") or []) == 1]
    if not readers or environment.source.group_builder:
        return ""

    async def read() -> str:
        said = list[str]()
        for tool in readers[:MOST_READERS]:
            for form in READS:
                before, env = _list_files(), environment.source.env(task, environment.tokenizer)
                try:
                    begun = await env.initial_observation()
                    assert isinstance(begun, tuple)
                    seen = begun[0].length
                    made = [path for path in _list_files(before) if os.path.isfile(path)]
                    made = [path for path in made if os.path.basename(path) not in task.prompt_text]
                    for path in sorted(made)[: max(1, environment.source.max_turns - 1)]:
                        call = write_call(tool, text=form.format(path))
                        tokens = environment.tokenizer.encode(call, add_special_tokens=False)
                        result = await env.step([*tokens, environment.tokenizer.eos_token_id])
                        if result.next_observation is None:
                            break
                        said.append(environment.tokenizer.decode(result.next_observation.tokens[seen:]))
                        seen = result.next_observation.length
                finally:
                    if isinstance(env, ClosableEnv):
                        await env.close()
        return "\n".join(said)

    with suppress(Exception):  # its failures are found elsewhere
        return run_with_limit(lambda: run_to_end(read()), environment.hang_s, "reading files")
    return ""


def _list_files(known: Collection[str] = ()) -> set[str]:
    """Files and folders in the working directory and the one for temporary files, but for the known; with a folder that
    is not known, its files."""
    found = {os.path.join(top, name) for top in {os.getcwd(), tempfile.gettempdir()} for name in os.listdir(top)}
    if not known:
        return found
    new = found.difference(known)
    return new.union(*(glob.glob(f"{glob.escape(one)}/*") for one in new))


def check_choices(environment: CheckedEnvironment) -> list[CheckResult]:
    """Whether the right choice stands in one place, or is the longest, more often than chance."""
    places, sizes, lengths = list[int](), list[int](), list[bool]()
    for task in {one.id: one for one in [*environment.scanned, *environment.scanned_heldout]}.values():
        if (found := find_choice(environment, task)) is None:
            continue
        options, right = found
        places.append(right)
        sizes.append(len(options))
        lengths.append(len(options[right]) == max(map(len, options)) and len(set(map(len, options))) > 1)
    if len(places) < FEWEST:
        return [not_tried("choice_bias", f"{len(places)} tasks have choices, {FEWEST} are needed")]
    usual = Counter(sizes).most_common(1)[0][0]
    counts = [places.count(place) for place in range(usual)]
    expected = len(places) / usual
    from scipy.stats import chi2

    p_place = float(chi2.sf(sum((count - expected) ** 2 / expected for count in counts), usual - 1))
    p_length = tail_probability(sum(lengths), len(lengths), min(0.95, 1.5 / usual))
    text = f"right choices by place {counts}, p={p_place:.2g}; the longest {sum(lengths)} times, p={p_length:.2g}"
    if min(p_place, p_length) >= CHANCE:
        return [sound("choice_bias", text, len(places))]
    letter = "ABCDEFGHIJ"[counts.index(max(counts))]
    said = f"{letter} is right in {max(counts)} of {len(places)} tasks" if p_place < CHANCE else "the longest is right"
    return [CheckResult("choice_bias", CheckState.FAULT, text, len(places), (said,))]


def find_choice(environment: CheckedEnvironment, task: Task) -> tuple[list[str], int] | None:
    """The choices of a task and the index of the right one; None for a task without choices."""
    given: Any = next((task.meta[name] for name in CHOICES if task.meta.get(name)), None)
    if isinstance(given, Mapping):
        given = given.get("text") or list(given.values())
    listed = list(map(str, given)) if isinstance(given, (list, tuple)) else None
    if listed is None:
        listed = [text for _, text in _CHOICE.findall(_read_prompt(task))]
    answer = environment.find_answer(task)
    if len(listed) < 2 or answer is None:
        return None
    if answer in listed:
        return listed, listed.index(answer)
    if match := re.fullmatch(r"\(?([A-Ja-j])\)?\.?", answer.strip()):
        place = ord(match[1].upper()) - ord("A")
        return (listed, place) if place < len(listed) else None
    is_place = given is not None and answer.isdigit() and int(answer) < len(listed)  # of a row: in a text it is a value
    return (listed, int(answer)) if is_place else None
