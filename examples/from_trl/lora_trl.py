from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def close(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model="./tiny-model",
    train_dataset=load_dataset("json", data_files="sums.jsonl", split="train"),
    reward_funcs=close,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    args=GRPOConfig(
        output_dir="runs/lora-trl",
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
trainer.save_model("lora-trl")
