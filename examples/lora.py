"""One island that trains a LoRA adapter: `python examples/lora.py LEARNER_ID STEPS OUT`.

The base model is the same everywhere, and only the adapter is exchanged.
"""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from skerry import attach

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id, steps, out = sys.argv[1:]
    torch.manual_seed(0)  # the same random base on all islands; in earnest this is from_pretrained(...)
    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
    learner = attach(
        model, optimizer, tokens_per_step=8 * 16, planned_token_count=2 * 8 * 16 * int(steps),  # of two islands
        target=TARGET, run="lora", learner_id=learner_id, create=True,
    )  # fmt: skip
    data = torch.randint(1, 3, (8 * int(steps), 16)).cumsum(1) % 64  # counting up by one or two
    for tokens in DataLoader(data, batch_size=8, num_workers=2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learner.leave(60.0, load_merged=True)
    model.save_pretrained(out)  # the adapter with the run's weights, merged
