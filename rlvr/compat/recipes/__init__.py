"""Recipes, each a command with `key=value` words: `python -m rlvr.compat.recipes.rl_loop model_name=... data=...`.

`rl_loop` is a whole RL loop over the four calls of the SDK, to read and to change. `rl_basic`, `math_rl` and `sl_basic`
say a few words of settings to `rlvr train`, and take all of its own. `docs/tinker/recipes.md` shows them.
"""
