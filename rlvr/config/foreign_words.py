"""The words of TRL's `GRPOConfig` and of verl's config: the key of ours that each sets, or why there is none.

    rlvr train --config-name=dataset dataset_name=a/b per_device_train_batch_size=16 num_generations=8 beta=0.001
    rlvr train --config-name=dataset data.train_files=a.parquet actor_rollout_ref.rollout.n=8 trainer.total_epochs=3

TRL's words stand at the top of a config, verl's in its sections. A word without a counterpart is refused with what to
do, unless its value says that it is off. `docs/reference/coming-from.md` shows these tables; `rlvr.config.aliases`
looks words up in them. Versions: TRL 1.16, verl 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlvr.config.alias import Alias
from rlvr.config.trl_words import TRL
from rlvr.config.verl_words import VERL

FOREIGN: Mapping[str, Alias] = {alias.word: alias for alias in (*TRL, *VERL)}
VERL_SECTIONS = ("actor_rollout_ref", "data", "trainer", "critic", "reward_model", "custom_reward_function")
