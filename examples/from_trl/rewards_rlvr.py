import rlvr


def close(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def short(completions, **kwargs):
    return [1 / (1 + len(c)) for c in completions]


run = rlvr.train(
    model="./tiny-model",
    data="sums.jsonl",
    reward=[(close, 1.0), (short, 0.2)],
    lora=None,
    name="rewards-rlvr",
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-5,
)
run.export("rewards-rlvr")
