from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def close(completions, answer, **kwargs):
    return [float(a in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)]


def to_messages(row):
    return {"prompt": [{"role": "user", "content": row["prompt"]}]}


trainer = GRPOTrainer(
    model="./tiny-model",
    train_dataset=load_dataset("json", data_files="sums.jsonl", split="train").map(to_messages),
    tools=[multiply],
    reward_funcs=close,
    args=GRPOConfig(
        output_dir="runs/tools-trl",
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_tool_calling_iterations=3,
        learning_rate=1e-5,
        use_cpu=True,
        report_to=[],
    ),
)
trainer.train()
trainer.save_model("tools-trl")
