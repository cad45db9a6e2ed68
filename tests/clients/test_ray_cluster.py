"""How a process joins a Ray cluster, and the errors if it cannot: no package, no cluster, other code, a second one."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.core import ray_cluster
from rlvr.core.machine import describe_code, hash_package
from rlvr.core.ray_cluster import RayError, check_same_code, join_cluster
from tests.kit.local_ray import open_cluster


def test_other_code_or_another_python_is_refused_with_both_versions() -> None:
    ours = describe_code()
    check_same_code(ours | {"machine": "a"}, "a")
    with pytest.raises(RayError, match=rf"worker on b has python 3\.9\.1, this process has python {ours['python']}"):
        check_same_code(ours | {"python": "3.9.1"}, "b")
    with pytest.raises(RayError, match=rf"rlvr None, this process has rlvr {rlvr.__version__} \({hash_package()}\)"):
        check_same_code({"python": ours["python"]}, "b")


def test_without_the_package_the_message_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nfrom rlvr.reward import resolve_reward\n"
        "resolve_reward('code', sandbox={'ray': 'auto'}).start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ray is not installed: pip install 'rlvr[ray]'" in done.stderr


@pytest.mark.slow
def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys; from rlvr.core.ray_cluster import join_cluster; join_cluster(sys.argv[1])"
    for given, reason in ((address, "refused"), ("a cluster", "expected auto, local or HOST:PORT")):
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, timeout=60)
        assert f"ray={given}: no cluster could be joined" in done.stderr and reason in done.stderr
        assert "set RAY_AUTH_MODE=token here" in done.stderr


def test_a_recorded_cluster_that_has_died_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    code = "from rlvr.core.ray_cluster import join_cluster; join_cluster('auto')"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**env, "RAY_TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "ray=auto: no cluster could be joined" in done.stderr and "refused" in done.stderr


NEWER = """
import sys
from pathlib import Path
from rlvr.core.machine import describe_code
from rlvr.sandbox.ray_sandbox import RaySandbox
describe_code()  # what this process runs; then the files change, as on a machine that was updated
with open(Path(sys.argv[1]) / "rlvr" / "sandbox" / "verdict.py", "a") as file:
    file.write("# newer")
RaySandbox("local", workers=1)
"""


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    shutil.copytree(Path(rlvr.__file__).parent, tmp_path / "rlvr", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", NEWER, str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    version = rf"has rlvr {rlvr.__version__} \(\w{{12}}\)"
    assert re.search(rf"the worker on \S+ {version}, this process {version}; install", done.stderr), done.stderr


LISTENING = """
import ray  # as other code may have done before
from pathlib import Path
from rlvr.core.ray_cluster import join_cluster
join_cluster("local")
node = ray._private.worker._global_node
own = {place.readlink().name for started in node.all_processes.values() for one in started
       for place in Path(f"/proc/{one.process.pid}/fd").iterdir() if place.readlink().name.startswith("socket:")}
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            print("listens", words[1].partition(":")[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cluster_of_this_machine_alone_listens_on_the_loopback_address() -> None:
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=120, env=environment
    )
    found = set(re.findall(r"listens (\w+)", done.stdout))
    assert found, done.stderr
    assert found <= {
        "0100007F",
        "0000000000000000FFFF00000100007F",
        "00000000000000000000000001000000",
    }  # 127.0.0.1, ::1


@pytest.mark.slow
def test_a_cluster_that_ray_start_makes_asks_for_a_token_as_the_page_starts_it(tmp_path: Path) -> None:
    """Ray 2.60 asks for none unless it is told to. Here on the loopback address."""
    pytest.importorskip("ray")
    page = (Path(__file__).parents[2] / "docs" / "verify" / "sandbox.md").read_text(encoding="utf-8")
    assert (
        page.index("RAY_AUTH_MODE=token") < page.index("ray get-auth-token --generate") < page.index("ray start --head")
    )
    join = "import sys; from rlvr.core.ray_cluster import join_cluster; join_cluster(sys.argv[1]); print('joined')"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "other").mkdir()
    ours = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["start", "--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets are in it
        subprocess.run([*ray, "get-auth-token", "--generate"], env=ours, capture_output=True, check=True, timeout=60)
        block = subprocess.Popen([*ray, *head, f"--temp-dir={folder}", "--block"], env=ours, stdout=subprocess.DEVNULL)
        try:
            wait_for_port(port, 60)
            said = [
                subprocess.run(
                    [sys.executable, "-c", join, f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=120,
                    env={**ours, "HOME": home},
                )
                for home in (str(tmp_path), str(tmp_path / "other"))
            ]  # fmt: skip
        finally:
            block.terminate()
            block.wait(30)
    assert said[0].stdout == "joined\n", said[0].stderr
    assert said[1].returncode == 1 and "no authentication token was found" in said[1].stderr, said[1].stderr


def wait_for_port(port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with open_cluster(1) as ray:
        yield ray


@pytest.mark.slow
def test_a_process_is_told_that_it_cannot_join_a_second_cluster(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ranks of a run would be placed on the cluster of one machine that its sandbox has started, say."""
    monkeypatch.setattr(ray_cluster, "_joined", "local")
    here = cluster.get_runtime_context().gcs_address
    for same in ("local", here, here.replace("127.0.0.1", "localhost")):
        join_cluster(same)
    for other in ("auto", "127.0.0.1:1", "203.0.113.7:6379"):
        with pytest.raises(RayError, match=rf"ray={other}: this process has already joined the cluster at {here}"):
            join_cluster(other)
    monkeypatch.setattr(ray_cluster, "_joined", "auto")
    with pytest.raises(RayError, match=r"ray=local: .*the same address"):
        join_cluster("local")
