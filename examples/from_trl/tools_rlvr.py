import rlvr


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def close(prompt, response, meta):
    return float(meta["answer"] in response)


run = rlvr.train(
    model="./tiny-model",
    data={
        "name": "tools",
        "kwargs": {"inner": "dataset", "inner_kwargs": {"path": "sums.jsonl"}, "tools": [multiply], "max_turns": 4},
    },
    reward=close,
    lora=None,
    name="tools-rlvr",
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-5,
)
run.export("tools-rlvr")
