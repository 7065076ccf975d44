"""What a trainer sends equals what transformers would save, name by name and byte by byte."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import FAMILIES, HYBRIDS, make_checkpoint
from support.multimodal_checkpoints import WHOLE, as_before_version_5, make_multimodal_checkpoint

from caesura.client.trainer import checkpoint_tensors
from caesura.io_struct import CaesuraError

CASES = [
    *((family, tied) for family in (*FAMILIES, *HYBRIDS) for tied in (False, True)),
    *((architecture, False) for architecture in WHOLE),
]


def build(path: Path, name: str, tied: bool = False) -> transformers.PreTrainedModel:
    if name in WHOLE:
        model = make_multimodal_checkpoint(path / "wide", name)
    else:
        model = make_checkpoint(path / "wide", name, tied=tied)
    model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_equal_to_save_pretrained(tmp_path: Path, name: str, tied: bool):
    model = build(tmp_path, name, tied)
    spelled = (
        as_before_version_5 if name in WHOLE else str
    )  # checkpoints of some still are, and engines take both
    saved = {spelled(key): value for key, value in load_file(tmp_path / "model.safetensors").items()}
    sent = [(spelled(key), value) for key, value in checkpoint_tensors(model)]
    assert sorted(name for name, _ in sent) == sorted(saved)
    for name, tensor in sent:
        assert tensor.dtype == saved[name].dtype
        assert tensor.shape == saved[name].shape
        assert bytes_of(tensor) == bytes_of(saved[name])


def test_tensors_are_views_of_the_model(tmp_path):
    model = build(tmp_path, "qwen3-moe")
    listed = dict(checkpoint_tensors(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert all((tensor == 3).all() for tensor in listed.values())


def test_experts_fused_in_an_unknown_way_are_refused(tmp_path):
    model = build(tmp_path, "qwen3-moe")
    model.config.model_type = "unheard_of"
    with pytest.raises(CaesuraError, match="unheard_of") as caught:
        list(checkpoint_tensors(model))
    assert caught.value.code == "unsupported"
