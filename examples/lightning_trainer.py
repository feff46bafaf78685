"""One island with Lightning's Trainer: `python examples/lightning_trainer.py LEARNER_ID STEPS OUT`."""

import os
import sys

import lightning
import torch

from skerry.integrations.lightning import SkerryCallback

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")


class Rotation(lightning.LightningModule):
    """Learns to rotate a vector by one place, from noisy examples."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Linear(32, width))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return torch.nn.functional.mse_loss(self.layers(batch), batch.roll(1, dims=1) + torch.randn_like(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    learner_id, steps, out = sys.argv[1:]
    skerry = SkerryCallback(
        tokens_per_step=32, planned_token_count=2 * 32 * int(steps),  # of two islands
        target=TARGET, run="lightning", learner_id=learner_id, create=True,
    )  # fmt: skip
    trainer = lightning.Trainer(
        max_steps=int(steps), accumulate_grad_batches=2, callbacks=[skerry], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Rotation(), torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=16, num_workers=2))
    trainer.save_checkpoint(out)  # the run's weights, merged
