"""`rlvr.audit`: measure a verifier from a program, as `rlvr audit` does.

report = rlvr.audit(close, labelled=[{"answer": "4", "response": "4", "label": True}, ...])
report.failed, report.data[0]["false_positive"], print(report)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.audits.commands import Audit, AuditLimits
from rlvr.audits.verifier_errors import BUILTIN
from rlvr.audits.verify_rows import check_count, name_reward
from rlvr.core.files import write_atomic
from rlvr.core.registry import show_names
from rlvr.runs.library import name_caller
from rlvr.runs.program_settings import argument_error, list_rows, name_options
from rlvr.runs.user_messages import mask_secrets, print_message
from rlvr.tracking import readable_lines

# The options of the command that have other names here.
OPTIONS = {"reward-option": "options", "tier": "tiers", "category": "categories", "family": "families", "json": "write"}


@dataclass(frozen=True)
class AuditReport:
    """What an audit measured: the `text` that the command prints, and the `data` that its `--json` writes.

    `failed`: an attack succeeded, an environment is broken, a fault was seen that is not allowed, or a rate is above
    its limit. Printed, it is the text.
    """

    text: str
    data: Any
    failed: bool

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<AuditReport: {'failed' if self.failed else 'passed'}, {len(self.text.splitlines())} lines to print>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows: the text."""
        printer.text(self.text)

    def write(self, file: str | Path) -> Path:
        """Write `data` as JSON; the file."""
        write_atomic(Path(file), json.dumps(self.data, indent=2))
        return Path(file)


def audit(
    reward: Any = None,
    *,
    labelled: Any = None,
    attack: bool = False,
    env: str | None = None,
    options: Mapping[str, Any] | None = None,
    against: Any = (),
    allow: Sequence[str] = (),
    max_false_accepts: float = AuditLimits.false_accepts,
    max_false_rejects: float = AuditLimits.false_rejects,
    max_errors: float = AuditLimits.errors,
    tiers: Sequence[str] = (),
    categories: Sequence[str] = (),
    families: Sequence[str] = (),
    samples: int | None = None,
    show: int = 10,
    workers: int | None = None,
    quiet: bool = False,
) -> AuditReport:
    """Measure a verifier: give `labelled` rows, `attack=True`, or an environment `env` whose own scorers are audited.

    - `reward`: a function, the name of a reward, an object of `resolve_reward`, or a list, as for `rlvr.train`.
      `options` are options of it by name.
    - `labelled`: rows with `response`, `label` (whether the verifier should accept) and what the reward reads, usually
      an `answer`; a file of these; or `"builtin"`, the pairs of mathematics that come with the package. The error
      rates have 95 % intervals, and every row is tried in other orders and with probes that no verifier should accept.
      `against` are verifiers for the same rows, `allow` names of faults that are intended, `max_...` the shares of the
      rows up to which the audit does not fail.
    - `attack`: run the hack suite against a verifier of programs; `tiers` and `categories` choose from it.
    - `env`: `"reasoning_gym"`; `families` and `samples` of each.
    - `show`: how many wrong rows the text has. `workers`: attacks or families at once. `quiet`: no progress.

    ValueError for arguments that do not go together, and where the verifier can judge none of the rows. A verifier that
    fails raises nothing: `failed` says so.
    """
    with name_caller("rlvr.audit", options=OPTIONS):
        name, named = ("", dict(options or {})) if reward is None else name_reward(reward, options)
        others = [against] if isinstance(against, str) or callable(against) else list(against)
        command = Audit(
            name,
            named,
            _list_names("tiers", tiers),
            [_name_other(other) for other in others],
            check_count("workers", workers),
            show,
            _list_names("categories", categories),
            env,
            _list_names("families", families),
            samples,
            AuditLimits(max_false_accepts, max_false_rejects, max_errors),
            _list_names("allow", allow),
        )
        result = command.run(attack, _read_labelled(labelled), None, (lambda text: None) if quiet else print_message)
    text = readable_lines(mask_secrets(show_names(name_options(result.text, OPTIONS))))
    return AuditReport(text, result.report, result.failed)


def _read_labelled(given: Any) -> Any:
    """A file's name, or rows."""
    if given is None or (isinstance(given, str) and given in BUILTIN):
        return given
    if isinstance(given, Path) or (isinstance(given, str) and "\n" not in given):
        return str(Path(given).expanduser())
    return list_rows(given, "labelled", "response")


def _list_names(argument: str, given: Sequence[str]) -> list[str]:
    """The names in a list; ValueError for one text, which would be a list of letters."""
    if isinstance(given, str):
        raise argument_error(f"{argument}={given!r}, expected a list of names: {argument}=[{given!r}]")
    return list(given)


def _name_other(other: Any) -> str:
    name, options = name_reward(other, None)
    if options:
        raise argument_error(f"against: the reward {name} has options, which cannot be given here; give a function")
    return name
