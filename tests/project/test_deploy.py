"""What stands beside the package to run it elsewhere says only what the service knows: image, compose file, Prometheus.

The image's steps are carried out by deploy/prove_image.sh, which needs root and a network, and is not run here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
RAY_DOCKERFILE = (ROOT / "deploy" / "ray.Dockerfile").read_text(encoding="utf-8")


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
    for given in re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE + RAY_DOCKERFILE):
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


def test_the_job_for_kuberay_is_a_sharded_run_that_its_pods_can_hold() -> None:
    """Its form, and that the command is one of this version: it has not been run on Kubernetes."""
    from rlvr.config import load
    from rlvr.config.build_config import build_config

    text = (ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")
    claim, job = yaml.safe_load_all(text)
    assert "NOT YET RUN" in text
    assert (claim["kind"], job["apiVersion"], job["kind"]) == ("PersistentVolumeClaim", "ray.io/v1", "RayJob")
    program, command, name, *words = job["spec"]["entrypoint"].split()
    assert (program, command, name) == ("rlvr", "train", "--config-name=arithmetic")
    config = build_config(load("arithmetic", None, words))
    assert (config.client.name, config.client.ray) == ("sharded", "auto")
    cluster = job["spec"]["rayClusterSpec"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={cluster['rayVersion']}\n" in pinned
    assert cluster["authOptions"] == {"mode": "token"}
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == config.client.ranks
    for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        [container] = pod["containers"]
        assert int(container["resources"]["requests"]["cpu"]) >= config.client.cpus_per_rank
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == [config.run.root]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert f"docker build -t {container['image']} -f deploy/ray.Dockerfile ." in RAY_DOCKERFILE
    assert f"useradd --system --uid {pod['securityContext']['fsGroup']} " in DOCKERFILE


def test_every_container_has_limits_and_writes_to_its_volumes_only() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["pids_limit"] and service["mem_limit"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(
            volume.split(":")[0] in COMPOSE["volumes"] or volume.endswith(":ro") for volume in service["volumes"]
        )


def test_prometheus_reads_the_rules_that_compose_gives_it() -> None:
    [rules] = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8"))["rule_files"]
    assert f"./deploy/{rules}:/etc/prometheus/{rules}:ro" in COMPOSE["services"]["prometheus"]["volumes"]


def test_the_service_needs_nothing_that_draws_or_trains(tmp_path: Path) -> None:
    """Its own process: without these packages, which its image does not install, it starts, judges and analyses."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'PIL', 'scipy', 'torch', 'transformers']))\n"
        "import rlvr.service.http.app, rlvr.service.generators.build_generator, rlvr.service.dashboard.dashboard_app\n"
        "from rlvr.service.http.pattern_report import describe_patterns\n"
        "from rlvr.store import Experience, Session, open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.add_session(Session('s', 't', 'p'))\n"
        "store.add_experiences([Experience('s', 't', 1, 'p', 'o', outcome='passed')])\n"
        "assert describe_patterns(store)['groups'][0]['pass_rate'] == 1.0\n"
        "from rlvr.reward.blend import Blend\n"
        "assert Blend.of(['math', 'draft']).judge('1+1?', 'It is ' + chr(92) + 'boxed{2}.', {'answer': '2'}).truth\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store.sqlite")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
