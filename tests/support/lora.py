"""Adapters as trainers save them, written by PEFT, and what its models compute with them."""

import json
import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    base: Path, path: Path, targets: Sequence[str], *, rank: int = 4, seed: int = 0, **config: object
) -> Path:
    """Write an adapter with random factors for the model in ``base``."""
    torch.manual_seed(seed)
    given = {"lora_alpha": 2 * rank, "init_lora_weights": False, **config}
    lora = LoraConfig(r=rank, target_modules=list(targets), **given)
    with warnings.catch_warnings():  # of adapted heads, which are saved as they are
        warnings.simplefilter("ignore", UserWarning)
        get_peft_model(_model(base), lora).save_pretrained(path)
    return path


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return checksums as SGLang's trainers send them."""
    return {
        name: sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def edit_adapter(path: Path, *, drop: str = "", rename: tuple[str, str] = ("", ""), **config: object) -> None:
    """Change fields of the config, drop the tensors with ``drop`` in their names, or rename some."""
    file, settings = path / "adapter_model.safetensors", path / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))
    tensors = {
        name.replace(*rename) if rename[0] else name: tensor
        for name, tensor in load_file(file).items()
        if not drop or drop not in name
    }
    save_file(tensors, file)


def merge_adapter(base: Path, adapter: Path, path: Path) -> None:
    """Write the model in ``base`` with the adapter's products added to its weights."""
    PeftModel.from_pretrained(_model(base), adapter).merge_and_unload().save_pretrained(path)


def logprobs_by_peft(base: Path, adapter: Path | None, ids: Sequence[int], start: int) -> list[float]:
    """Return log-probabilities of ``ids`` from ``start`` on."""
    model = _model(base)
    if adapter is not None:
        with warnings.catch_warnings():  # of tied heads
            warnings.simplefilter("ignore", UserWarning)
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        values = model.eval()(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return [float(values[at - 1, ids[at]]) for at in range(start, len(ids))]


def _model(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
