"""The trainer's process of one adapter."""

from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ..messages import Initialised
from ..settings import LoraSettings
from ..trainer import answer, connected, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def serve_adapter(pipe: Connection, settings: LoraSettings, checkpoints: Path) -> None:
    """Train the adapter of ``settings.target`` as long as the run asks for updates."""
    # Imported here: the run's own process never needs torch.
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ..learner import Learner
    from ..policy import CheckpointWriter
    from ..sender import AdapterSender
    from .adapter import add_adapter, peft_config, peft_tensors, save_adapter

    disable_progress_bar()
    torch.set_num_threads(settings.trainer_threads)
    torch.manual_seed(settings.seed)
    connect = connected(pipe)
    model = Qwen3ForCausalLM.from_pretrained(connect.base, dtype=torch.float32)
    add_adapter(model, settings)
    parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)
    answer(pipe, Initialised(path=connect.base, parameters=parameters))
    learner = Learner(model, settings)
    learner.remember(0)

    def save(model: "PreTrainedModel", folder: Path) -> None:
        save_adapter(model, settings, folder)

    writer = CheckpointWriter(checkpoints, save)
    sender = AdapterSender(
        connect.endpoint, settings, peft_config(model, settings), lambda: writer.write(model)
    )
    with closing(sender):
        train(
            pipe,
            learner,
            sender,
            tensors=lambda: peft_tensors(model),
            keep=lambda: save(model, settings.out_dir / "adapters" / settings.target),
        )
