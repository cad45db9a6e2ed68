"""Builds the job of a run: what `rlvr.training.loop` needs, on the objects that its assembly made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.algorithms.task_teachers import TaskTeachers
from rlvr.chat.chat_template import has_template
from rlvr.clients.teacher import EndpointTeacher, TeacherOptions, check_same_tokens
from rlvr.config import read
from rlvr.config.schema import RunConfig
from rlvr.core.weights_place import CHECKPOINTS, SETTINGS
from rlvr.envs.prompted_source import PromptedSource, apply_prompt_options
from rlvr.runs.assembly import Assembly
from rlvr.runs.run_folder import prompt_options
from rlvr.runs.run_tasks import check_completions, fit_prompts
from rlvr.runs.weights import open_weights
from rlvr.tracking.trackers import Trackers
from rlvr.training.callbacks import Callbacks
from rlvr.training.curriculum import Curriculum
from rlvr.training.hints import make_hint_writer
from rlvr.training.monitor import Monitor
from rlvr.training.parts import TrainerParts
from rlvr.training.trainer import Trainer
from rlvr.training.training_job import TrainingJob


def build_job(assembly: Assembly, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]) -> TrainingJob:
    """Build the whole job for `rlvr.training.loop.TrainingLoop`. Epochs have become steps before (`resolve_epochs`),
    and the verifiers have started."""
    config, reward, watched = assembly.config, assembly.reward, assembly.watched
    assert config.training.epochs is None, "rlvr.runs.run_tasks.resolve_epochs comes first"
    if reward.caution and not {w.name for w in watched} - {reward.name} and config.training.mode == "rlvr":
        warn(f"the reward {reward.name!r} can be hacked: {reward.caution}")
    callbacks = Callbacks(config.callbacks)
    trackers = build_trackers(config, folder, say, warn)
    client = assembly.build_client(folder / CHECKPOINTS, say, warn)
    options = prompt_options(config, folder)
    source = apply_prompt_options(assembly.source, client.get_tokenizer(), options, warn)
    if isinstance(source, PromptedSource):
        say(f"the model reads each prompt {source.writer}")
    elif options != config.prompt and has_template(client.get_tokenizer()):
        say("this run began before there was prompt.chat: it goes on without the tokenizer's chat template")
    elif config.model.name and options.chat == "auto" and not has_template(client.get_tokenizer()):
        say(
            "the tokenizer has no chat template: the model reads each prompt as it stands and continues it, so prompts "
            "should end where an answer begins (`Answer:`)"
        )
    source = fit_prompts(config, source, client.get_tokenizer(), say)
    if source.opponent:
        say(f"loading the opponent {source.opponent}")
        source.seat(open_sampler(source.opponent, assembly, client.get_tokenizer(), "env.kwargs.opponent"))
    for text in source.advice():
        warn(text)
    if text := check_completions(config, source):
        warn(text)
    hints = None
    if config.curriculum.hint_step:
        hints = make_hint_writer(source, client.get_tokenizer(), (config.rollout.max_tokens or 0) - 1)
    curriculum = Curriculum(source, config.curriculum, config.seed, hints)
    for text in curriculum.advice() if config.training.mode == "rlvr" else ():
        warn(text)
    teacher = build_teacher(assembly, client.get_tokenizer(), say) if assembly.has_teacher else None
    parts = TrainerParts(
        client,
        source,
        reward,
        assembly.algorithm,
        config.rollout,
        config.training,
        curriculum,
        config.seed,
        watched,
        teacher,
    )
    return TrainingJob(
        trainer=Trainer(parts, Monitor(config.training, warn)),
        sft=config.sft,
        evaluation=config.evaluation,
        options=config.run,
        folder=folder,
        trackers=trackers,
        callbacks=callbacks,
        weights_sha256=client.weights_sha256,
    )


def build_trackers(
    config: RunConfig, folder: Path, say: Callable[[str], None], warn: Callable[[str], None]
) -> Trackers:
    return Trackers(config.tracking, folder, folder.name, read(folder / SETTINGS), warn, say=say)


def build_teacher(assembly: Assembly, tokenizer: Any, say: Callable[[str], None]) -> Any:
    """The teacher, or those of the tasks, checked: ValueError if the tokenizer of one is not the policy's, or it gives
    no log-probs. What several entries name is loaded once."""
    options, opened = assembly.config.teacher, dict[str, Any]()
    try:
        for one in options.every:
            if one.weights_source not in opened:
                opened[one.weights_source] = open_teacher(one, assembly, tokenizer, say)
    except BaseException:
        TaskTeachers(opened).close()
        raise
    default = opened[options.weights_source] if options.is_given else None
    if not options.for_tasks:
        return default
    return TaskTeachers(
        {v: opened[one.weights_source] for v, one in options.of_values.items()}, default, options.task_key
    )


def open_teacher(options: TeacherOptions, assembly: Assembly, tokenizer: Any, say: Callable[[str], None]) -> Any:
    """One teacher, checked."""
    say(f"loading the teacher {options}" if options.model else f"the teacher is {options}")
    if options.url:
        teacher = EndpointTeacher(options)
        try:
            teacher.check(tokenizer, _name_policy(assembly))
        except BaseException:
            teacher.close()
            raise
        return teacher
    assert options.model is not None
    return open_sampler(options.model, assembly, tokenizer, "teacher.model")


def open_sampler(given: str, assembly: Assembly, tokenizer: Any, key: str) -> Any:
    """A sampler of the weights that a key of the config names: ValueError if its tokenizer is not the policy's."""
    sampler = open_weights(given, assembly, key)
    check_same_tokens(tokenizer, sampler.get_tokenizer(), f"{key}={given}", _name_policy(assembly))
    return sampler


def _name_policy(assembly: Assembly) -> str:
    model = assembly.config.model
    named = ((key, getattr(model, key)) for key in ("start_from", "name", "tokenizer"))
    return next((f"model.{key}={value}" for key, value in named if value), f"client={assembly.config.client.name}")
