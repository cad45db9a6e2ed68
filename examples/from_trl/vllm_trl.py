from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def close(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model="./tiny-model",
    train_dataset=load_dataset("json", data_files="sums.jsonl", split="train"),
    reward_funcs=close,
    args=GRPOConfig(
        output_dir="runs/vllm-trl",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url="http://127.0.0.1:8000",
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-5,
        report_to=[],
    ),
)
trainer.train()
trainer.save_model("vllm-trl")
