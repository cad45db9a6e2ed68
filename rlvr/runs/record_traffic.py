"""`rlvr record`: a model behind the recorder, until a signal, for agents that are not trained now.

record_traffic("./my-model", Path("traffic.jsonl"), [], port=8000, say=print)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlvr.clients.registry import close_client
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.protocols import SamplingClient
from rlvr.core.weights_place import CHECKPOINTS, WeightsPlace
from rlvr.runs.assembly import assemble
from rlvr.runs.user_messages import mask_secrets
from rlvr.runs.weights import check_to_sample, open_to_train, read_run, with_model
from rlvr.training.best_checkpoint import resolve_best
from rlvr.training.initial_weights import newest_weights


@contextmanager
def open_to_sample(
    given: str, overrides: Sequence[str] | Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[SamplingClient]:
    """A sampler of a run's newest weights, of a checkpoint, a model or an adapter, until the block ends.

    With `sampler.name=vllm` the servers sample, and of a model only the tokenizer is read here.
    """
    if "://" in given:
        raise ValueError(
            f"--model {mask_secrets(given)} is an address. Token ids are recorded, which endpoints of text do not "
            "return: give the folder or hub name of the model, and a vLLM server of it by sampler.name=vllm "
            "sampler.urls=[http://127.0.0.1:8790]"
        )
    place = WeightsPlace.of(resolve_best(Path(given).expanduser()))
    if place.run:
        with _open_run(given, place.run, overrides, note) as sampler:
            yield sampler
        return
    loaded = load(None, None, overrides)
    loaded = replace(loaded, values={**loaded.values, "env": {"name": "toy"}, "reward": {"type": "exact_match"}})
    config = build_config(with_model(loaded, place))
    if not config.sampler_options.servers:
        check_to_sample(place, note)
        yield assemble(config).build_sampler(place.adapter, note)
        return
    if place.adapter:
        raise ValueError(
            f"--model {given} is an adapter, and sampler.name={config.sampler.name} serves whole models; leave the "
            "sampler out, or merge it into its base (`rlvr export`) and serve that"
        )
    with config.sampler_options.open_served(_load_tokenizer(config.model.tokenizer or given), note) as sampler:
        yield sampler


@contextmanager
def _open_run(
    given: str, run: Path, overrides: Sequence[str] | Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[SamplingClient]:
    assembly = assemble(read_run(run, overrides))
    with ExitStack() as stack:
        folder = run / CHECKPOINTS
        if assembly.config.sampler_options.servers:  # what the run itself gave its servers stays as it is
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="recorder-", dir=run)))
        client = open_to_train(assembly, newest_weights(given, "the model"), folder, note)
        stack.callback(close_client, client)
        yield client.create_sampling_client()


def record_traffic(
    model: str,
    out: Path,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM, and write every call to `out`."""
    try:
        from rlvr.recorder.recording_server import RecordingPolicy, RecordingServer
        from rlvr.web.server import BackgroundServer, bind_socket, is_loopback, server_url
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed; recording needs the extras: pip install 'rlvr[train,serve]'"
        ) from error
    from rlvr.chat.conversation import ChatTemplate
    from rlvr.recorder.recording import RecordingFile

    if not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines, and a recorder has no keys: anyone could use the "
            "model. Listen on 127.0.0.1, or put a proxy with keys in front"
        )
    name = str(Path(model).absolute()) if Path(model).exists() else model  # `rlvr rows` looks for it from anywhere
    with bind_socket(host, port) as listening, ExitStack() as stack:
        say(f"loading {model}")
        sampler = stack.enter_context(open_to_sample(model, overrides, say))
        file = stack.enter_context(RecordingFile(out, name))  # a model that is not there leaves no recording
        template = ChatTemplate(sampler.get_tokenizer())
        policy = RecordingPolicy(sampler, file, template)
        stack.callback(policy.stop)
        server = RecordingServer(policy, file, template, model)
        with BackgroundServer(server.app, listening) as running:
            url = server_url(listening)
            addresses = server.addresses(server.open(), url)
            say(f"every call is written to {out}. A program needs one of these, and any key:")
            say(f"  export OPENAI_BASE_URL={addresses['openai_base_url']}")
            say(f"  export ANTHROPIC_BASE_URL={addresses['anthropic_base_url']}")
            say(f"Its reward: curl -X POST {addresses['url']}/reward -d '{json.dumps({'reward': 1})}'")
            say(f"Another rollout, with addresses of its own: curl -X POST {url}/rollouts")
            running.wait(lambda: None)


def show_rows(path: Path, tokenizer: str | None, *, keep_retried: bool = False) -> list[str]:
    """What would be trained of a recording, as lines: each row, with what the policy sampled between marks."""
    from rlvr.recorder.rows import make_rows
    from rlvr.recorder.traces import load_recording

    recording = load_recording(path)
    if not (tokenizer or recording.model):
        raise ValueError(f"{path} does not say which model was recorded; give --tokenizer, the folder or name of it")
    words = _load_tokenizer(tokenizer or recording.model)
    lines: list[str] = []
    total = trained = 0
    for rollout in recording.rollouts:
        reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
        rows = make_rows(rollout, words, keep_retried=keep_retried)
        has_several = len({row.temperature for row in rows}) > 1
        lines.append(f"rollout {rollout.id}: {len(rollout.calls)} calls, {len(rows)} rows, {reward}")
        for number, row in enumerate(rows):
            total += len(row.full_tokens)
            trained += row.num_action_tokens
            at = f" at temperature {row.temperature:g}" if has_several else ""
            own = f", reward {row.turn_credits[-1]:g}" if row.turn_credits else ""
            lines.append(f"  row {number}: {len(row.full_tokens)} tokens, {row.num_action_tokens} are trained{at}{own}")
            lines += [
                f"    {part}" for part in _mark_sampled(row.full_tokens, len(row.prompt_tokens), row.action_mask, words)
            ]
    lines.append(f"{len(recording.rollouts)} rollouts, {total} tokens, {trained} are trained")
    return lines


def _load_tokenizer(name: str) -> Any:
    from rlvr.engine.tokenizer import load_tokenizer

    place = WeightsPlace.of(name)
    if place.run:
        name = str(newest_weights(name, "the model"))
    return load_tokenizer(name)


def _mark_sampled(tokens: Sequence[int], prompt: int, mask: Sequence[int], tokenizer: Any) -> list[str]:
    """The text in pieces of what was read and what was sampled: `read "..."`, `SAMPLED "..."`."""
    marks = [0] * prompt + list(mask)
    pieces: list[str] = []
    start = 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or marks[place] != marks[start]:
            text = tokenizer.decode(list(tokens[start:place]), skip_special_tokens=False)
            pieces.append(f"{'SAMPLED' if marks[start] else 'read   '} {text!r}")
            start = place
    return pieces
