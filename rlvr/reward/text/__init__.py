"""Rewards on text: form, rules, exact answers, patterns, repetition."""
