import rlvr


def close(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


run = rlvr.train(
    model="./tiny-model",
    data="sums.jsonl",
    reward=close,
    lora=None,
    name="grpo-rlvr",
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-5,
)
run.export("grpo-rlvr")
