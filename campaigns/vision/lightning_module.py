"""A LightningModule, and a checkpoint of it, as `load_from_checkpoint` reads one."""

import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn


class Classifier(lightning.LightningModule):  # type: ignore[misc] # it has no types here
    """Has hyperparameters, a metric's buffer, and forward as its inference."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.5)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).mean((2, 3)))
        return found

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(file: Path, width: int = 8) -> None:
    """Train for some steps, and write a checkpoint."""
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 16, 16), torch.randint(0, 4, (16,)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=file.parent,
    )
    trainer.fit(Classifier(width), torch.utils.data.DataLoader(data, batch_size=8))
    trainer.save_checkpoint(file)


def loaded() -> Classifier:
    """What a user's factory does with a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.ckpt"
        trained(file, width=6)
        module: Classifier = Classifier.load_from_checkpoint(file, map_location="cpu")
    module.eval()
    return module
