from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def close(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def short(completions, **kwargs):
    return [1 / (1 + len(c)) for c in completions]


trainer = GRPOTrainer(
    model="./tiny-model",
    train_dataset=load_dataset("json", data_files="sums.jsonl", split="train"),
    reward_funcs=[close, short],
    args=GRPOConfig(
        output_dir="runs/rewards-trl",
        reward_weights=[1.0, 0.2],
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-5,
        use_cpu=True,
        report_to=[],
    ),
)
trainer.train()
trainer.save_model("rewards-trl")
