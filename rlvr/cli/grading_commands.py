"""`rlvr verify` and `rlvr audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlvr.runs.user_messages import mask_secrets, print_message

RewardName = Annotated[str, typer.Option("--reward", help="A reward by name, or package.module:function.")]
RewardOptions = Annotated[
    list[str] | None, typer.Option("--reward-option", help="An option of the reward: key=value; may be repeated.")
]
MaxErrors = Annotated[float, typer.Option(help="Share of rows that may stay without a verdict.")]


def verify(
    answers: Annotated[Path, typer.Argument(help="JSON lines or one JSON list; may be gzipped.")],
    reward: RewardName,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file for the verdicts; default: standard output.")
    ] = None,
    response_field: Annotated[
        str | None, typer.Option("--response-field", help="The field of a row that holds the answer.")
    ] = None,
    reward_option: RewardOptions = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Rows graded at once; default: one per core.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Grade only the first N rows.")] = None,
    max_errors: MaxErrors = 0.0,
    min_pass_rate: Annotated[float, typer.Option(help="Share of the judged rows that must pass.")] = 0.0,
) -> None:
    """Grade a file of completions, one verdict per row. The same command resumes a stopped one.

    rlvr verify completions.jsonl --reward code --reward-option timeout_s=10 --out verdicts.jsonl

    The exit code is 1 if a row is without a verdict (outcomes error, invalid; --max-errors allows a share of them), or
    fewer pass than --min-pass-rate.
    """
    from rlvr.audits.commands import check_shares, reward_options
    from rlvr.audits.grade_file import ProgressLine, RewardPool, grade_file

    check_shares("verify", max_errors=max_errors, min_pass_rate=min_pass_rate)
    grader = RewardPool(reward, reward_options(reward_option or []), workers)
    tally = grade_file(
        answers, grader, out, field=response_field, limit=limit, log=print_message, progress=ProgressLine()
    )
    print_message(tally.table())
    if broken := tally.list_broken_thresholds(max_errors, min_pass_rate):
        print_message("\n".join(broken))
        raise typer.Exit(1)


def audit(
    reward: Annotated[str, typer.Option("--reward", help="A reward by name, or package.module:function.")] = "",
    attack: Annotated[bool, typer.Option("--attack", help="Run the hack suite against a verifier of code.")] = False,
    labelled: Annotated[
        str | None, typer.Option("--labelled", help="A file of labelled rows, builtin or builtin-lenient.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option("--tier", help="A sandbox tier; may be repeated; default: all that work.")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="A category of attacks; may be repeated; default: all.")
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="An environment whose own scorers to audit: reasoning_gym.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option("--family", help="A family of --env; may be repeated; default: all.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Tasks of each family of --env.")] = None,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="Another verifier to compare with on the same rows.")
    ] = None,
    reward_option: RewardOptions = None,
    max_false_accepts: Annotated[float, typer.Option(help="Share of false rows that may be accepted.")] = 0.0,
    max_false_rejects: Annotated[float, typer.Option(help="Share of true rows that may be refused.")] = 0.05,
    max_errors: MaxErrors = 0.0,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A fault that is intended, such as case; may be repeated.")
    ] = None,
    show: Annotated[int, typer.Option("--show", help="How many wrong rows to show.")] = 10,
    workers: Annotated[int | None, typer.Option("--workers", help="Attacks or families run at once.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole result to this JSON file.")] = None,
) -> None:
    """Measure a verifier: its error rates on labelled rows, and which attacks of the hack suite succeed.

    rlvr audit --reward math --labelled builtin --against rlvr.audits.peers:math_verify

    rlvr audit --reward code --attack --json audit.json      (exit code 1 if an attack succeeds)

    rlvr audit --env reasoning_gym --family countdown --json audit.json      (every family without --family)
    """
    from rlvr.audits.commands import Audit, AuditLimits, reward_options
    from rlvr.tracking import readable_lines

    options = reward_options(reward_option or [])
    command = Audit(
        reward,
        options,
        tier or [],
        against or [],
        workers,
        show,
        category or [],
        env,
        family or [],
        samples,
        AuditLimits(max_false_accepts, max_false_rejects, max_errors),
        allow or [],
    )
    result = command.run(attack, labelled, json_file, print_message)
    typer.echo(readable_lines(mask_secrets(result.text)))
    if result.failed:
        raise typer.Exit(1)
