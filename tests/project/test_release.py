"""What a release says of itself is the same in every file, and its extras are documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import rlvr

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Of the schema of the Citation File Format 1.2.0: what a file must have, and what this one may.
REQUIRED = {"authors", "cff-version", "message", "title"}
ALLOWED = {
    *REQUIRED,
    "abstract",
    "date-released",
    "doi",
    "keywords",
    "license",
    "repository-code",
    "type",
    "url",
    "version",
}


def test_the_citation_is_valid_and_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert set(citation) >= REQUIRED and set(citation) <= ALLOWED
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["authors"] == [{"name": "The rlvr authors"}]
    assert str(citation["version"]) == rlvr.__version__ and citation["license"] == PROJECT["license"]
    assert len(set(citation["keywords"])) == len(citation["keywords"])


def test_the_version_is_semantic_and_the_changelog_has_a_place_for_the_next() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", rlvr.__version__)
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_extra_for_users_has_a_row_and_no_row_is_without_one() -> None:
    page = (ROOT / "docs" / "start" / "installation.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w-]+)` \|", page.partition("## Extras")[2].partition("\n## ")[0], re.M))
    assert rows == set(PROJECT["optional-dependencies"]) - {"all", "rlvr", "dev", "docs", "bench"}


def test_every_requirement_is_pinned() -> None:
    """`make setup` and `make setup-dev` install the same versions everywhere."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {normal(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    needed = [*PROJECT["dependencies"], *(n for needs in PROJECT["optional-dependencies"].values() for n in needs)]
    names = {normal(re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0]) for need in needed} - {"rlvr"}
    assert names - pinned == set()


def test_training_is_light() -> None:
    """What only one feature imports is an extra of its own, and what only tests import is in none."""
    assert sorted(re.split(r"\W", need)[0] for need in PROJECT["optional-dependencies"]["train"]) == [
        "jinja2", "matplotlib", "safetensors", "tokenizers", "torch", "transformers",
    ]  # fmt: skip
