"""Settings of the service: their sources, their precedence, and the messages for wrong ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy", reason="the extra [serve] is not installed")

from rlvr.service.service_options import TrainingConfig
from rlvr.service.settings import Settings, environment_names, load_settings


def load(environment: dict[str, str] | None = None, flags: dict[str, Any] | None = None, file: Path | None = None):
    warnings: list[str] = []
    settings = load_settings(file, environment or {}, flags or {}, warnings.append)
    return settings, warnings


def test_the_defaults_are_the_documented_ones():
    settings, warnings = load()
    assert (settings.port, settings.host) == (3035, "127.0.0.1") and not warnings
    assert settings.training == TrainingConfig(
        max_iterations=10, min_confidence=0.8, batch_size=32, learning_rate=0.001, entropy_coefficient=0.01,
        value_coefficient=0.5, policy_coefficient=1.0, experience_buffer_size=1000, min_experiences_for_training=50,
        convergence_threshold=0.01,
    )  # fmt: skip
    assert settings.generator == settings.llm and settings.llm.endpoint == "http://localhost:3031/generate"
    assert not settings.judge and not settings.cors_origins


def test_the_default_endpoint_gives_way_to_another_generator_and_none_is_none():
    for environment in ({"RLVR_MODEL": "x"}, {"RLVR_DEMO": "true"}, {"LLM_ENDPOINT": "none"}):
        assert not load(environment)[0].llm
    named = load({"LLM_MODEL": "mine"})[0].llm
    assert (named.endpoint, named.model) == ("http://localhost:3031/generate", "mine")
    settings = load({"LLM_ENDPOINT": "none"})[0]
    assert dataclasses.replace(settings, port=1).generator == ""


def test_flags_override_the_environment_that_the_file_and_that_the_defaults(tmp_path: Path):
    file = tmp_path / "service.yaml"
    file.write_text("port: 1001\nhost: 127.0.0.2\ntraining: {max_iterations: 3, learning_rate: 1e-3}\nseed: 5\n")
    settings, _ = load({"PORT": "1002", "HOST": "127.0.0.3"}, {"port": 1003, "host": None}, file)
    assert (settings.port, settings.host, settings.seed) == (1003, "127.0.0.3", 5)
    assert settings.training.max_iterations == 3 and settings.training.learning_rate == 0.001
    assert settings.training.batch_size == 32
    assert load({"RLVR_CONFIG": str(file)})[0].port == 1001


def test_every_key_of_the_training_config_can_be_set_by_environment_and_by_yaml(tmp_path: Path):
    values = {"max_iterations": 7, "min_confidence": 0.5, "batch_size": 8, "learning_rate": 0.25}
    values |= {"entropy_coefficient": 0.5, "value_coefficient": 0.25, "policy_coefficient": 2.0}
    values |= {"experience_buffer_size": 77, "min_experiences_for_training": 9, "convergence_threshold": 0.125}
    assert {field.name for field in dataclasses.fields(TrainingConfig)} == set(values)
    by_environment, _ = load({f"RLVR_{key.upper()}": str(value) for key, value in values.items()})
    file = tmp_path / "service.yaml"
    file.write_text("training:\n" + "".join(f"  {key}: {value}\n" for key, value in values.items()))
    by_file, _ = load(file=file)
    assert by_environment.training == by_file.training == TrainingConfig(**values)  # pyright: ignore


def test_every_key_but_the_log_has_one_variable_and_no_two_share_one():
    names = environment_names()
    assert len(set(names.values())) == len(names)
    assert {"PORT", "HOST", "DATABASE_URL", "LLM_ENDPOINT", "LLM_MODEL", "JUDGE_ENDPOINT", "RLVR_MODEL"} <= set(names)
    leaves = {key for field in dataclasses.fields(Settings) for key in [field.name] if key != "log"}
    assert {key.partition(".")[0] for key in names.values()} == leaves


def test_the_log_is_rlvr_log_then_log_level_then_rust_log():
    every = {"RLVR_LOG": "info,rlvr=debug", "LOG_LEVEL": "WARNING", "RUST_LOG": "trace"}
    assert load(every)[0].log == "info,rlvr=debug"
    del every["RLVR_LOG"]
    assert load(every)[0].log == "WARNING"
    del every["LOG_LEVEL"]
    assert load(every)[0].log == "trace"


def test_lists_and_numbers_of_the_environment():
    settings, _ = load({"RLVR_CORS_ORIGINS": "https://a.example, http://b:8080", "RLVR_KEEP_DAYS": "3"})
    assert settings.cors_origins == ("https://a.example", "http://b:8080") and settings.retention.keep_days == 3
    assert load({"RLVR_DASHBOARD": "false"})[0].dashboard is False
    assert load({"RLVR_KEYS_FILE": "12"})[0].keys_file == Path("12")


def test_a_generator_by_flag_replaces_one_in_the_environment():
    settings, _ = load({"LLM_ENDPOINT": "http://127.0.0.1:1/generate"}, {"demo": True})
    assert settings.demo and not settings.llm and settings.llm.api_key_env == "LLM_API_KEY"
    settings, _ = load({"RLVR_DEMO": "true"}, {"model": "runs/mine"})
    assert settings.model == "runs/mine" and not settings.demo


def test_a_misspelled_variable_is_warned_about():
    _, warnings = load({"RLVR_MAX_ITERATION": "3", "RLVR_SOMETHING_ELSE": "x", "PATH": os.environ.get("PATH", "")})
    assert warnings == ["RLVR_MAX_ITERATION is no setting of the service (did you mean RLVR_MAX_ITERATIONS?)"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PORT": "abc"}, r"port='abc' \(from PORT\): input should be a valid integer"),
        ({"PORT": "70000"}, r"port=70000 \(from PORT\): .* less than or equal to 65535"),
        ({"RLVR_MAX_ITERATIONS": "0"}, "training.max_iterations=0 .*greater than or equal to 1"),
        ({"RLVR_MAX_ITERATIONS": "2.5"}, "RLVR_MAX_ITERATIONS"),
        ({"RLVR_MIN_CONFIDENCE": "1.5"}, "training.min_confidence=1.5 .*less than or equal to 1"),
        ({"RLVR_LEARNING_RATE": "nan"}, "training.learning_rate=nan"),
        ({"RLVR_ENTROPY_COEFFICIENT": "inf"}, "training.entropy_coefficient=inf"),
        ({"RLVR_DEMO": "maybe"}, r"demo='maybe' \(from RLVR_DEMO\)"),
        ({"LLM_ENDPOINT": "localhost:3031"}, r"llm.endpoint='localhost:3031', expected a URL.*from LLM_ENDPOINT"),
        ({"LLM_ENDPOINT": "http://user:secret@host/"}, "holds a password"),
        ({"LLM_ENDPOINT": "http://127.0.0.1:8000/v1"}, "needs its model's name: .*LLM_MODEL.*from LLM_ENDPOINT"),
        ({"JUDGE_ENDPOINT": "http://127.0.0.1:8000/judge"}, "JUDGE_ENDPOINT is given without JUDGE_MODEL"),
        ({"LLM_ENDPOINT": "http://h/", "RLVR_MODEL": "x"}, "LLM_ENDPOINT and RLVR_MODEL are given"),
        ({"RLVR_CORS_ORIGINS": "*"}, r"cors_origins='\*', expected an origin"),
        ({"RLVR_QUEUE": "-1"}, r"limits.queue=-1 \(from RLVR_QUEUE\): .*greater than or equal to 0"),
        ({"RLVR_KEEP_DAYS": "-1"}, "keep_days=-1.0; expected a positive number"),
        ({"RLVR_KEEP_EXPERIENCES": "10"}, "the buffer holds 1000"),
        ({"RLVR_MIN_EXPERIENCES_FOR_TRAINING": "2000"}, "nothing would be learned"),
        ({"RLVR_MAX_ITERATIONS": "60"}, "above limits.most_iterations=50"),
    ],
)
def test_a_wrong_value_names_its_source(environment: dict[str, str], said: str):
    with pytest.raises(ValueError, match=said) as error:
        load(environment)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "training: {max_iteration: 3}",
            r"training.max_iteration \(from .*\) is no setting \(did you mean 'training.m",
        ),
        ("traning: {batch_size: 3}", r"traning \(from .*\) is no section of settings \(did you mean 'training'\?\)"),
        ("prot: 3", r"prot \(from .*\) is no setting \(did you mean 'port'\?\)"),
        ("training: 3", "training=3"),
        ("llm: text", "llm='text'"),
        ("- 1", "expected keys and values"),
        ("1: 2", "expected keys and values"),
        ("a: [", "is not YAML"),
        ("port: '5'", "port='5'"),
    ],
)
def test_a_wrong_file_names_the_nearest_key(text: str, said: str, tmp_path: Path):
    file = tmp_path / "service.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        load(file=file)
    with pytest.raises(ValueError, match="cannot be read"):
        load(file=tmp_path / "missing.yaml")
