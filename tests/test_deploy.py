"""What stands beside the package to run it elsewhere says only what the service knows: image, compose file, Prometheus.

The image's steps are carried out by deploy/prove_image.sh, which needs root and a network, and is not run here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SOURCES = ("service/http/metrics_text.py", "web/prometheus.py")  # of the names of metrics


def known_variables() -> set[str]:
    from rlvr.service.settings import LOG_VARIABLES, environment_names

    return {*environment_names(), *LOG_VARIABLES, "RLVR_API_KEYS", "LLM_API_KEY"}


def test_the_image_and_the_compose_file_set_what_the_service_reads() -> None:
    told = set(COMPOSE["services"]["service"]["environment"])
    [line] = re.findall(r"^ENV (.+)$", DOCKERFILE, re.M)
    told |= {part.partition("=")[0] for part in line.split()} - {"PATH", "PYTHONUNBUFFERED"}
    assert told <= known_variables()
    assert {"RLVR_API_KEYS", "DATABASE_URL", "LLM_ENDPOINT", "HOST", "PORT", "RLVR_STATE"} <= told


def test_the_image_installs_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for given in re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE):
        assert set(given.split(",")) <= set(extras), given
    copied = {path for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M) for path in line.split()}
    assert all((ROOT / path).exists() for path in copied)
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"}
    assert copied == taken


def test_prometheus_asks_where_the_service_answers() -> None:
    [job] = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    [place] = job["dns_sd_configs"]
    service = COMPOSE["services"]["service"]
    assert place["names"] == ["service"]
    assert f":{place['port']}" in service["ports"][0] and f"PORT={place['port']}" in DOCKERFILE
    [secret] = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert f"${{{COMPOSE['secrets'][secret]['environment']}:" in service["environment"]["RLVR_API_KEYS"]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rlvr" / "service").rglob("routes_*.py"))
    assert f'"{job["metrics_path"]}"' in source


def test_every_metric_of_the_page_is_one_that_the_service_gives() -> None:
    page = (ROOT / "docs" / "service-operations.md").read_text(encoding="utf-8")
    source = "".join((ROOT / "rlvr" / place).read_text(encoding="utf-8") for place in SOURCES)
    named = set(re.findall(r"\brlvr_[a-z_]+", page))
    made = set(re.findall(r'"(rlvr_[a-z_]+)"', source))
    made |= {f"{name}_total" for name in made} | {f"{name}_bucket" for name in made}
    made |= {f"rlvr_{name}" for name in re.findall(r'"([a-z_]+)"', source)}  # of loops over names
    made |= {f"rlvr_task_{name}" for name in re.findall(r'"([a-z_]+)"', source)}
    assert named <= made, named - made
