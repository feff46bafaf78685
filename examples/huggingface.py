"""One island with Hugging Face's Trainer: `python examples/huggingface.py LEARNER_ID STEPS OUT`."""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from skerry.integrations.transformers import SkerryCallback

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id, steps, out = sys.argv[1:]
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    tokens = torch.randint(1, 3, (256, 16)).cumsum(1) % 64  # counting up by one or two
    arguments = TrainingArguments(
        out,
        max_steps=int(steps),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=20,
        save_strategy="no",
        use_cpu=True,
        dataloader_num_workers=2,
    )
    planned = 2 * int(steps) * 8 * 16  # tokens of two islands
    skerry = SkerryCallback(
        target=TARGET, run="huggingface", learner_id=learner_id, create=True, planned_token_count=planned
    )
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], callbacks=[skerry]
    )
    trainer.train()
    trainer.save_model()  # the run's weights, merged
