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
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""Parameters of all experts of a layer, in transformers 5."""


def make_adapter(
    base: Path, path: Path, targets: Sequence[str], *, rank: int = 4, seed: int = 0, **config: object
) -> Path:
    """Write an adapter with random factors for the model in ``base``."""
    torch.manual_seed(seed)
    given = {"lora_alpha": 2 * rank, "init_lora_weights": False, **config}
    lora = LoraConfig(r=rank, target_modules=list(targets), **given)
    with warnings.catch_warnings():  # of adapted heads, and of patterns for parameters
        warnings.simplefilter("ignore")
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


def split_experts(adapter: Path, path: Path, experts: int) -> Path:
    """Write an adapter of :data:`EXPERTS` with a module for each expert, as older checkpoints have them."""
    path.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ALL_LINEAR}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, found, half = name.partition(".mlp.experts.")
        if not found:
            tensors[name] = tensor
            continue
        parts, half = (["gate_proj", "up_proj"] if "base_layer" in half else ["down_proj"]), half[-13:]
        for expert in range(experts):
            if "lora_A" in half:
                own = [tensor.view(experts, -1, tensor.shape[1])[expert]] * len(parts)
            else:
                own = list(tensor.view(len(tensor), -1, experts)[:, :, expert].chunk(len(parts)))
            for part, values in zip(parts, own, strict=True):
                tensors[f"{module}{found}{expert}.{part}.{half}"] = values.clone()
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def merge_adapter(base: Path, adapter: Path, path: Path) -> None:
    """Write the model in ``base`` with the adapter's products added to its weights."""
    PeftModel.from_pretrained(_model(base), adapter).merge_and_unload().save_pretrained(path)


def logprobs_by_peft(base: Path, adapter: Path | None, ids: Sequence[int], start: int) -> list[float]:
    """Return log-probabilities of ``ids`` from ``start`` on."""
    model = _model(base)
    if adapter is not None:
        with warnings.catch_warnings():  # of tied heads
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        values = model.eval()(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return [float(values[at - 1, ids[at]]) for at in range(start, len(ids))]


def _model(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
