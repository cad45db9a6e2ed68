"""What is busy in a run and what waits for what, from its metrics: a part is busy for its share of a step."""

from __future__ import annotations

from rlvr.service.dashboard.dashboard_data import MachineGroup, MachinePart
from rlvr.service.dashboard.run_reader import RunReader

STEPS = 10  # that the means cover
STAGES = (
    ("Sampler", "time/sampling", "the weights of the last update"),
    ("Verifiers", "time/scoring", "the last completion of a step"),
    ("Learner", "time/update", "the verdicts of the step"),
)


def run_machines(run: RunReader) -> MachineGroup | None:
    """The parts of a run over its last `STEPS` steps; None if it has not measured a step."""
    metrics = run.metrics()
    last = {name: values[-STEPS:] for name in metrics.names if len(values := metrics.steps_and_values(name)[1])}
    means = {name: float(values.mean()) for name, values in last.items()}
    whole = means.get("time/step", 0.0)
    if whole <= 0:
        return None
    did = {
        "Sampler": f"{means.get('tokens_per_second', 0):,.0f} tokens/s of the whole step",
        "Verifiers": f"after the last completion; broke on {means.get('verifier/error_rate', 0):.1%} of completions",
        "Learner": f"{means.get('updates', 0):.1f} updates a step, {means.get('tokens_trained', 0):,.0f} tokens",
    }  # fmt: skip
    parts = [
        MachinePart(
            name,
            min(1.0, means[key] / whole),
            f"{means[key]:.2f} s a step{'' if name == 'Verifiers' else ';'} {did[name]}",
            waits,
        )
        for name, key, waits in STAGES
        if key in means
    ]
    longest = max(parts, key=lambda part: part.busy or 0.0, default=None)
    status = run.status()
    verb = "takes" if status in ("running", "writing") else "took"
    about = f"A step {verb} {whole:.2f} s (mean of the last {len(last['time/step'])})"
    about += f", most of it the {longest.name.lower()}'s." if longest else "."
    rest = 1 - sum(part.busy or 0.0 for part in parts)
    if parts and rest >= 0.005:
        parts.append(MachinePart("The rest", rest, f"{rest * whole:.2f} s a step; logging and saving"))
    ranks = [int(name.rpartition("/")[2]) for name in means if name.startswith("ranks/busy/")]
    for rank in sorted(ranks):
        idle = means.get(f"ranks/idle/{rank}", 0.0)
        waits = f"slower ranks, {idle:.1%} of the time" if idle >= 0.005 else ""
        parts.append(MachinePart(f"Rank {rank}", means[f"ranks/busy/{rank}"], "of the time in commands", waits))
    if "ranks/transfer_s" in means:
        text = (
            f"{means['ranks/transfer_s']:.2f} s among the ranks, {means.get('ranks/publish_s', 0):.2f} s to the sampler"
        )
        parts.append(MachinePart("Exchange", None, text))
    if "async/staleness_mean" in means:
        age = f"completions are {means['async/staleness_mean']:.1f} steps old"
        lost = f"{last['async/discarded_groups'][-1]:,.0f} groups discarded" if "async/discarded_groups" in last else ""
        parts.append(MachinePart("Queue of completions", None, ", ".join(filter(None, (age, lost)))))
    return MachineGroup(run.name, status, parts, about, run.name)
