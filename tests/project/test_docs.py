"""The documentation: the site builds without a warning and needs nothing from elsewhere, and every code block of its
pages, of the README and of the examples does what it says (how: `doc_pages.py`)."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.algorithms import ALGORITHMS
from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.envs import registry as environments
from rlvr.reward import registry as rewards
from rlvr.training.curriculum import CURRICULA
from tests.kit.benchmark_rows import PROBLEMS, function, write
from tests.kit.code_rows import mbpp_file
from tests.kit.doc_pages import ROOT, blocks, run_page, trainings
from tests.kit.doc_pages import load_gen as gen
from tests.kit.recorder import write_traffic

PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("README.md")),
    )
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a hub model would look: byte-level BPE tokenizer with a chat template, 1-layer qwen3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(["What is 2 + 2? Answer: 4"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hub") / "model"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to type in; what is registered or imported there is gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("examples", "rlvr"):
        (tmp_path / name).symlink_to(ROOT / name)
    tables: list[dict[str, Any]] = [
        ALGORITHMS, ADVANTAGES._known, rewards._rewards._entries, environments._environments._entries
    ]  # fmt: skip
    before, modules, environment = [dict(table) for table in tables], set(sys.modules), dict(os.environ)
    yield tmp_path
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def world(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with what pages name."""
    rows = [{"question": f"Ann has {n} pens and buys 3.", "answer": f"{n} + 3\n#### {n + 3}"} for n in range(2, 22)]
    (folder / "gsm8k").mkdir()
    for split, part in (("train", rows[:14]), ("test", rows[14:])):
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tasks = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(5)]
    mbpp_file(folder)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    write(folder / "math500.jsonl", PROBLEMS)
    write(folder / "HumanEval.jsonl.gz", [function("add_two", "2"), function("add_three", "3")])
    (folder / "completions.jsonl").write_text(json.dumps({"response": r"so \boxed{0.5}", "answer": "1/2"}) + "\n")
    pairs = ROOT / "rlvr" / "audits" / "data" / "math_pairs.jsonl"
    (folder / "pairs.jsonl").write_text("".join(pairs.read_text().splitlines(keepends=True)[:20]))
    if any(re.search("model|gsm8k_", block.text) for block in blocks(request.node.callspec.params["page"])):
        hub = request.getfixturevalue("model")
        for name in ("my-model", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(hub)
        if any("traffic.jsonl" in block.text for block in blocks(request.node.callspec.params["page"])):
            write_traffic(hub, folder / "traffic.jsonl")
    return folder


QUICK_PAGES = (
    "docs/verify/sandbox.md",
    "docs/verify/mathematics.md",
    "docs/train/your-own-reward.md",
    "docs/api/rlvr.md",
)


@pytest.mark.parametrize(
    "page", [page if page in QUICK_PAGES else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the tinker SDK leaves its connections to the collector
def test_every_code_block_of_a_page_does_what_it_says(page: str, world: Path) -> None:
    if page == "docs/train/environments.md":
        pytest.importorskip("reasoning_gym", reason="the extra [reasoning-gym] is not installed")
    run_page(page)
    gc.collect()


@pytest.mark.slow
def test_no_two_commands_of_the_pages_share_a_run_folder(folder: Path) -> None:
    """A user who types all pages into one folder never gets the error that a run of that name exists."""
    files: dict[str, tuple[str, str]] = {}
    begun: dict[str, tuple[str, dict[str, Any]]] = {}
    for page in PAGES:
        for file, text in ((block.file, block.text) for block in blocks(page) if block.file):
            other, found = files.setdefault(file, (page, text))
            assert found == text, f"{file} of {page} would write over that of {other}"
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(text, encoding="utf-8")
        for line, words in [training for block in blocks(page) for training in trainings(block)]:
            options = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--"))
            loaded = load(options.get("config-name"), options.get("config"), [w for w in words if w[0] != "-"])
            config = build_config(loaded)
            settings = {**asdict(config), "run": {**asdict(config.run), "resume": True}}
            where = f"{config.run.root}/{config.run.name or loaded.name}"
            other, same = begun.setdefault(where, (f"{page}: {line}", settings))
            assert settings == same, f"{page}: {line}\n{other}\nare different runs in {where}; give one a run.name"
    assert len(begun) > 20 and "runs/arithmetic" in begun


WRONG = {
    "output that is not printed": "```python\nprint(1)\n```\n\n```text\n2\n```",
    "python that fails": "```python\n1 / 0\n```",
    "a command that fails": "```bash\nrlvr config --config-name=no_such_config\n```",
    "an indented command that fails": "Text.\n\n    rlvr config --config-name=no_such_config\n",
    "a command in a text block": "```text\n$ rlvr config --config-name=arithmetic\n```",
    "python in a text block": "```text\n>>> 1 + 1\n2\n```",
    "an unknown command": "```bash\ncurl https://example.org\n```",
    "a make target that is not there": "```bash\nmake coffee\n```",
    "an extra that is not there": "```bash\npip install 'rlvr[coffee]'\n```",
    "a setting that is not there": "```yaml\ntraining: {stepps: 1}\n```",
    "an unsupported language": "```javascript\n1\n```",
    "a block without a language": "```\n1\n```",
    "a block that never ends": "```python\n1\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_page_that_is_wrong_fails(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is skipped in silence."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(WRONG[what])
    with pytest.raises((Exception, pytest.fail.Exception)):
        run_page(str(page))


# ---- what docs/gen.py writes


def test_the_pages_show_what_the_code_has() -> None:
    """`python docs/gen.py` has run. In a process of its own, since tests register names too."""
    command = [sys.executable, str(ROOT / "docs" / "gen.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_written_between_two_marks_is_replaced_and_the_rest_stays() -> None:
    page = "a\n<!-- filled: losses -->\nanother term\n<!-- end: losses -->\nb\n"
    filled = gen().fill(page)
    assert filled.startswith("a\n<!-- filled: losses -->\n\n### `cross_entropy`\n\n- Term of a token: -w p;")
    assert "another" not in filled and filled.endswith("\n<!-- end: losses -->\nb\n")
    assert gen().fill(filled) == filled
    with pytest.raises(KeyError, match="no_such_table"):
        gen().fill("<!-- filled: no_such_table -->\n<!-- end: no_such_table -->\n")


def test_a_stub_has_fields_with_their_comments_and_methods_with_their_docstrings() -> None:
    gen()  # so that docs/ is importable
    make_stub = importlib.import_module("stubs").make_stub
    assert make_stub("rlvr.core.types.StopReason") == (
        "class StopReason(str, Enum):\n"
        '    STOP = "stop"  # a stop token or stop string was produced\n'
        '    LENGTH = "length"  # the token budget or the context ran out: the answer is truncated'
    )
    assert make_stub("rlvr.core.rng.integer") == "def integer(n: int, key: int, position: int = 0) -> int: ..."
    algorithm = make_stub("rlvr.algorithms.classic.PPO")
    assert algorithm.startswith("class PPO:\n    def __init__(self, config: PPOConfig | None = None) -> None: ...\n")
    assert "def update(self, batch:" in algorithm and "optimizer step." in algorithm, "of the private base class"
    assert "_adam" not in algorithm


def test_the_api_reference_has_every_exported_name_and_its_imports_work() -> None:
    page = (ROOT / "docs" / "api" / "rlvr.md").read_text(encoding="utf-8")
    imports = re.findall(r"^`from (\S+) import (\w+)`$", page, re.M)
    assert set(rlvr.__all__) <= {name for home, name in imports if home == "rlvr"} and len(imports) > 80
    for home, name in imports:
        assert getattr(importlib.import_module(home), name).__name__ == name, f"from {home} import {name}"


def test_the_api_reference_has_every_class_that_a_plug_in_may_subclass() -> None:
    """Those that the page of plug-ins names, and the base class of every kind of options."""
    from rlvr.config.register import TABLES

    page = (ROOT / "docs" / "api" / "rlvr.md").read_text(encoding="utf-8")
    extending = (ROOT / "docs" / "train" / "extending.md").read_text(encoding="utf-8")
    table = extending.partition("## Names of your own")[2].partition("[API page]")[0]
    named = {*re.findall(r"`([A-Z]\w+)`", table), *(kind.base.__name__ for kind in TABLES)}
    assert {"Callback", "ClientSpec", "LevelChoice"} <= named, "the table is read"
    assert not [name for name in named if f"\n### `{name}`\n" not in page]


def test_the_page_of_losses_has_every_loss_and_input() -> None:
    page = (ROOT / "docs" / "loss-functions.md").read_text(encoding="utf-8")
    inputs = {name for spec in LOSS_SPECS.values() for name in (*spec.required, *spec.optional)}
    assert not [name for name in (*LOSS_SPECS, *inputs) if f"| `{name}` |" not in page], "each has a row"
    headings = re.findall(r"^### `(\w+)`$", page.partition("<!-- end: losses -->")[0], re.M)
    assert headings == list(LOSS_SPECS)


def slugs(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_work_in_the_repository_too(page: str) -> None:
    """The site's build checks those among its own pages; here also those of the README, as a code host reads them."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(<?([^)\s>]+)>?\)", prose):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in slugs(target), f"{link}: that page has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_opens_with_a_title_and_a_sentence(page: str) -> None:
    """What it helps the reader do comes before any heading, code or table."""
    title, empty, first = (ROOT / page).read_text(encoding="utf-8").splitlines()[:3]
    assert title.startswith("# ") and not empty and re.match(r"(?!```)[A-Z`]", first), first


ALONE = ["env.name=toy", "client=mock", "rollout.max_tokens=8", "reward.type=length_penalty", "sft.steps=1"]
PREFERENCES = ("dpo", "ipo", "kto")
NEEDED = {  # what a word needs beside it
    "sampler.name=vllm": ["sampler.urls=[http://127.0.0.1:8790]", "client=local", "model.name=my-model"],
    "client=local": ["model.name=my-model"],
    "client=sharded": ["model.name=my-model"],
    "client=tinker": ["model.name=served"],
    "client=skyrl": ["model.name=served", "sft.optimizer.grad_clip=0", "training.optimizer.grad_clip=0"],
    "algorithm.loss=gspo": ["algorithm.clip_low=0.1", "algorithm.clip_high=0.1"],
    "curriculum.by=schedule": ['curriculum.schedule=[[0,{"":1}]]'],
    "sft.curriculum.by=schedule": ['sft.curriculum.schedule=[[0,{"":1}]]'],
    "training.stale=discard": ["training.schedule=completion", "training.max_steps_off_policy=1"],
    **{f"algorithm.loss={n}": ["algorithm.advantage=verdict", "algorithm.reduction=sequence_sum"] for n in PREFERENCES},
    "algorithm.advantage=zero": ["algorithm.teacher_coef=1"],
    "algorithm.terms.self_distillation.": ["algorithm.self_distillation_coef=1"],
    "algorithm.kl_": ["algorithm.kl_coef=0.1"],
    "evaluation.report=best": ["evaluation.every=1"],
    "algorithm.importance_mode": ["algorithm.importance_cap=2"],
    "algorithm.entropy": ["algorithm.entropy_coef=0.1"],
    "training.critic.": ["algorithm.name=ppo_critic"],
}


@pytest.mark.parametrize("key", gen().choices())
def test_each_listed_choice_of_a_key_is_accepted_and_another_word_is_not(key: str) -> None:
    def compose(word: str) -> None:
        said = f"{key}={word}"
        more = [setting for start, settings in NEEDED.items() if said.startswith(start) for setting in settings]
        base = [setting for setting in ALONE if not setting.startswith(f"{key}=")]
        build_config(load(None, None, [*base, said, *more]))

    words = gen().choices()[key]
    for word in words:
        compose(word)
    with pytest.raises(ValueError, match="no_such_word") as refused:
        compose("no_such_word")
    known = set(re.split(", | or ", re.split("expected |known: ", str(refused.value))[-1].partition(";")[0]))
    unfit = {way.name for way in CURRICULA.classes() if way.learns_from_verdicts and key == "sft.curriculum.by"}
    assert known - unfit == set(words), "none is left out"


FIXED = ("custom_loss_quickstart.md", "loss-functions.md", "dev/baseline.md")  # pages elsewhere link to them there
SECTIONS = {"Development": "dev"}  # folders that are not the section's name in small letters


def test_a_section_of_the_navigation_is_a_folder() -> None:
    """Also: the index has at most sixteen lines of what to read, a user's own data first, and pages are few."""
    lines = re.findall(r"^(  +)- (.*?): ?(\S*\.md)?$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    section = ""
    shown: list[str] = []
    for indent, title, page in lines:
        section = section if len(indent) > 2 else SECTIONS.get(title, title.lower())
        if page:
            shown.append(page)
            assert page in (*FIXED, "index.md", "api/rlvr.md") or page.startswith(f"{section}/"), page
    assert len(shown) == len(set(shown)) <= 46
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"^\| (.*) \|$", index.partition("## Try it")[0], re.M) if ".md)" in row]
    assert len(rows) <= 16 and "your-own-data.md" in rows[0]


# ---- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search(r"WARNING|ERROR|Warning:", done.stdout + done.stderr), done.stderr
    return folder


class _Loads(HTMLParser):
    """The addresses that a page fetches by itself, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        link = tag == "link" and given.get("rel") not in ("canonical", "next", "prev")
        source = given.get("href") if link else given.get("src") if tag in ("script", "img", "iframe") else None
        self.fetched += [source] if source else []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def text(path: Path) -> str:
    return "".join(_Loads(path.read_text(encoding="utf-8")).words)


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    """Every page is there, and can be read offline."""
    for source in (ROOT / "docs").rglob("*.md"):
        page = site / source.relative_to(ROOT / "docs").with_suffix(".html")
        fetched = _Loads(page.read_text(encoding="utf-8")).fetched
        assert fetched and not [address for address in fetched if re.match(r"(https?:)?//", address)]


@pytest.mark.slow
def test_reference_pages_show_what_the_code_has(site: Path) -> None:
    """Every row, setting, spelling, reward and environment is on its page: nothing is added undocumented."""
    shown = {
        "train/algorithms.html": "from rlvr.algorithms import *; print(*ALGORITHMS, 'kl_coef', 'importance_cap')",
        "reference/configuration.html": (
            "from rlvr.config.schema import RunConfig as Config; from rlvr.config.validate import list_keys\n"
            "from rlvr.config.aliases import ALIASES; print(*list_keys(Config), *(s.word for s in ALIASES))"
        ),
        "train/your-own-reward.html": "from rlvr.reward import *; print(*known_rewards())",
        "train/your-own-environment.html": "from rlvr.envs import *; print(*known_environments())",
    }
    for page, code in shown.items():  # in a process of its own: tests register names too
        told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        names, found = told.stdout.split(), text(site / page)
        assert len(names) > 3 and [name for name in names if name not in found] == [], page
