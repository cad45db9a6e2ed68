"""The config of a run that takes a second: one layer, two prompts a step, on the processor."""

TINY = """
seed: 3
env: {name: rpn_arithmetic, kwargs: {complexity: [1, 1], flaw: 0.0}}
model:
  tokenizer: words
  device: cpu
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 24}
rollout: {max_tokens: 6}
sft: {steps: 2, batch_size: 8}
training: {steps: 3, prompts_per_step: 2, group_size: 4}
evaluation: {tasks: 8, samples: 2}
run: {checkpoint_every: 1}
engine: {threads: 1}
"""
