"""OpenEnv's own graders of a running server, without its Docker: run by an interpreter that has `openenv`.

python openenv_validation.py PACKAGE URL TURN      prints {"check": [status, evidence]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from openenv.validation.graders import Subject
from openenv.validation.graders.runtime import ObservationSchemaGrader, RewardWellFormedGrader, StateContractGrader
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
from openenv.validation.runtime.collector import collect_runtime_evidence
from openenv.validation.runtime.contracts import RuntimePlan

if __name__ == "__main__":
    root, url, turn = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    manifest = OpenEnvYamlParser().parse(root)
    plan = RuntimePlan.model_validate(
        {"plan_schema_version": "1", "reset": {"episode_id": "mine", "seed": 1}, "actions": [{"message": turn}] * 3}
    )
    evidence = collect_runtime_evidence(url, plan, episode_timeout_s=manifest.resources.episode_timeout_s)
    subject = Subject(
        root=root, manifest=manifest, image_ref=None, running=None, outputs_dir=root, runtime_evidence=evidence
    )
    found = {"collection": ["fail" if evidence.failure_reason else "pass", [evidence.failure_reason]]}
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        result = grader.run(subject)
        found[grader.check_id] = [result.status.value, result.evidence]
    print(json.dumps(found))
