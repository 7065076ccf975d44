"""The language model of a multimodal checkpoint."""

import json
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.buckets_by_hand import Sender
from support.checkpoints import edit_config, quantize_fp8
from support.lanes import quick
from support.multimodal_checkpoints import (
    WHOLE,
    alone,
    as_before_version_5,
    in_modules,
    leave_out,
    make_multimodal_checkpoint,
    rename_tensors,
)
from support.plain_trainer import PlainTrainer, update_message
from support.scripted import EngineDriver, assert_error, tokens_of, vocabulary_of

from caesura.client.trainer import SharedTensors
from caesura.io_struct import CaesuraError, DestroyWeightsUpdateGroupReqInput, UpdateWeightsFromIPCReqInput
from caesura.scheduler.models.config import load_model_config

VOCAB, TOLERANCE = 97, 1e-4
PROMPT = [3 + 7 * token % 90 for token in range(60)]
QWEN, GEMMA = "Qwen3_5ForConditionalGeneration", "Gemma3ForConditionalGeneration"


def started(path, **options) -> EngineDriver:
    return EngineDriver(str(path), scripted=False, kv_pool_tokens=1024, **options)


def gap(driver, model) -> float:
    driver.flush()
    result = driver.complete(PROMPT, 8, seed=1, return_logprob=True, top_logprobs_num=VOCAB)
    with torch.no_grad():
        tokens = torch.tensor([[*PROMPT, *tokens_of(result)]])
        expected = model(input_ids=tokens).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return float((vocabulary_of(result.output_top_logprobs) - expected).abs().max())


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("architecture", WHOLE)
def test_logprobs_are_those_of_the_whole_model(architecture, tp, tmp_path):
    model = make_multimodal_checkpoint(tmp_path, architecture)
    with started(tmp_path, tp=tp) as driver:
        assert gap(driver, model) < TOLERANCE


@pytest.fixture(scope="module", params=quick(WHOLE, 2))
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("multimodal")
    models = [make_multimodal_checkpoint(folder / str(seed), request.param, seed=seed) for seed in (0, 1)]
    with started(folder / "0") as driver:
        yield driver, folder, models


@pytest.mark.parametrize("spelled", [in_modules, as_before_version_5, alone])
def test_updates_take_each_spelling(loaded, spelled, tmp_path):
    driver, folder, models = loaded
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((folder / "1" / "config.json").read_text())
    save_file(load_file(folder / "1" / "model.safetensors"), other / "model.safetensors")
    rename_tensors(other, spelled)
    for by_socket in (False, True):
        assert driver.update(folder / "0").committed
        assert gap(driver, models[0]) < TOLERANCE
        if by_socket:
            driver.pause("abort")
            reply = Sender(driver, other).send_all()[-1]
            driver.go_on()
        else:
            reply = driver.update(other)
        assert reply.committed, reply
        assert gap(driver, models[1]) < TOLERANCE


@pytest.mark.parametrize("paused", [True, False])
def test_fully_ignored_updates_change_nothing(paused, tmp_path):
    make_multimodal_checkpoint(tmp_path, QWEN)
    tensors = load_file(tmp_path / "model.safetensors")
    towers = [(name, value) for name, value in tensors.items() if "visual" in name]
    with started(tmp_path) as driver:
        rid = driver.generate(PROMPT, 8)
        driver.tick(3)
        if paused:
            driver.pause("in_place")
        with SharedTensors(towers) as shared:
            options = {"flush_cache": not paused, "abort_all_requests": True, "weight_version": "new"}
            message = UpdateWeightsFromIPCReqInput(specs=shared.specs, handle=shared.memory.handle, **options)
            reply = driver.call(message)
        assert (reply.committed, reply.session_id, reply.flushed) == (True, None, False)
        assert (reply.written_tensors, reply.skipped_tensors) == (0, len(towers))
        driver.assert_status(session=None, weights_epoch=0, weight_version="default")
        if paused:
            driver.go_on()
        driver.run_until_idle()
        result = driver.result(rid)
        assert (result.finish_reason.type, result.num_retractions) == ("length", 0)
        assert driver.status().weights_epoch == 0
        driver.engine.updates.poison("for this test")
        with SharedTensors(towers) as shared:
            message = UpdateWeightsFromIPCReqInput(specs=shared.specs, handle=shared.memory.handle)
            reply = driver.call(message)
        assert (reply.committed, reply.weights) == (False, "poisoned")


def test_fully_ignored_broadcasts_are_received(tmp_path):
    """The trainer's rank 0 would wait otherwise, and its next tensors would be taken for the ignored ones."""
    for seed in (0, 1):
        make_multimodal_checkpoint(tmp_path / str(seed), QWEN, seed=seed)
    tensors, trainer = load_file(tmp_path / "1" / "model.safetensors"), PlainTrainer()
    parts = [
        {name: tensors[name] for name in tensors if ("visual" in name) == tower} for tower in (True, False)
    ]
    with started(tmp_path / "1") as driver:
        expected = driver.check_weights().checksums
    with started(tmp_path / "0") as driver:
        trainer.beside(trainer.join)
        driver.call(trainer.init_message(), max_ticks=100_000)
        trainer.finish()
        driver.pause("abort")
        for part in parts:
            trainer.beside(partial(trainer.broadcast_each, part))
            reply = driver.call(update_message(part), max_ticks=100_000)
            trainer.finish()
            written = 0 if part is parts[0] else len(part)
            assert (reply.committed, reply.written_tensors) == (True, written)
            assert reply.skipped_tensors == len(part) - written
        assert driver.check_weights().checksums == expected
        driver.call(DestroyWeightsUpdateGroupReqInput(), max_ticks=100_000)
    trainer.close()


def test_a_folder_of_the_language_model_alone_is_an_update(tmp_path):
    first, second = tmp_path / "whole", tmp_path / "alone"
    make_multimodal_checkpoint(first, QWEN)
    model = make_multimodal_checkpoint(second, QWEN, seed=1)
    text = json.loads((second / "config.json").read_text())["text_config"]
    (second / "config.json").write_text(json.dumps({**text, "architectures": ["Qwen3_5ForCausalLM"]}))
    tensors = load_file(second / "model.safetensors")
    kept = {alone(name): value for name, value in tensors.items() if "visual" not in name}
    save_file(kept, second / "model.safetensors")
    with started(first) as driver:
        before = driver.check_weights().checksums
        assert driver.update(second).committed
        assert gap(driver, model) < TOLERANCE
        after = driver.check_weights().checksums
    assert before.keys() == after.keys()


def test_a_tower_alone_and_two_spellings_are_refused(tmp_path):
    make_multimodal_checkpoint(tmp_path, QWEN)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = "model.language_model.norm.weight"
    with started(tmp_path) as driver:
        save_file({**tensors, "model.norm.weight": tensors[norm].clone()}, tmp_path / "model.safetensors")
        error = assert_error(driver.update(tmp_path), "weight_mismatch")
        assert error.detail["mismatched"] == [{"name": "model.norm.weight", "reason": "named twice"}]
        tower = {name: value for name, value in tensors.items() if "visual" in name}
        save_file({**tower, "model.language_model.new": torch.zeros(2)}, tmp_path / "model.safetensors")
        error = assert_error(driver.update(tmp_path), "weight_mismatch")
        assert error.detail["unexpected"] == ["model.language_model.new"]
        assert "model.norm.weight" in error.detail["missing"]
        assert driver.status().weights == "valid"


def test_fields_that_published_configs_leave_out(tmp_path):
    """Gemma 3's, of which the hub's name few; here those that the class would make large are kept."""
    make_multimodal_checkpoint(tmp_path, GEMMA, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    before = load_model_config(tmp_path)
    edit_config(tmp_path, torch_dtype="float32")
    leave_out(
        tmp_path,
        *("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types", "query_pre_attn_scalar"),
        *("rms_norm_eps", "attention_bias", "hidden_activation", "tie_word_embeddings"),
    )
    leave_out(tmp_path, "tie_word_embeddings", "dtype", whole=True)
    after = load_model_config(tmp_path)
    assert (after.num_heads, after.num_kv_heads, after.head_dim) == (8, 4, 256)
    assert after.attention_scale == 256**-0.5
    assert after.tie_word_embeddings and not before.tie_word_embeddings
    leave_out(tmp_path, "vocab_size", "max_position_embeddings", "sliding_window")
    absent = load_model_config(tmp_path)
    assert (absent.vocab_size, absent.max_position_embeddings) == (262208, 131072)
    assert set(absent.windows) == {4096}


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
@pytest.mark.parametrize("level", ["whole", "text", "alone"])
def test_plain_modules_are_named_as_their_tensors(prefix, level, tmp_path):
    blocks, path = (4, 4), tmp_path / "model.safetensors"
    make_multimodal_checkpoint(tmp_path, QWEN)
    tensors, skipped = load_file(path), []
    for name, value in list(tensors.items()):
        module = name.removesuffix(".weight")
        if "_proj" not in name or "visual" in name or "language_model" not in name:
            continue
        if module.endswith(("in_proj_a", "in_proj_b", "layers.1.self_attn.o_proj")):
            skipped.append(module.replace("model.language_model.", prefix))
        else:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(value, blocks)
    save_file(tensors, path)
    quantized = {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": list(blocks),
            "modules_to_not_convert": [*skipped, "model.visual", "lm_head"],
        }
    }
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    if level == "whole":
        edit_config(tmp_path, **quantized)
    elif level == "text":
        edit_config(tmp_path, text_config={**text, **quantized})
    else:
        alone_config = {**text, **quantized, "architectures": ["Qwen3_5ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(alone_config))
    with started(tmp_path) as driver:
        slots = driver.engine.runner.model.weight_slots()
    assert slots["model.layers.1.self_attn.o_proj.weight"].dtype == torch.float32
    assert slots["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert slots["model.layers.0.linear_attn.in_proj_a.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": [QWEN]},
        {"architectures": [QWEN], "text_config": 7},
        {"architectures": [QWEN], "text_config": {}},
    ],
)
def test_a_model_without_a_language_model_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CaesuraError) as caught:
        load_model_config(tmp_path, "auto")
    assert caught.value.code == "checkpoint_error"


@pytest.mark.parametrize(
    "architecture", ["Gemma3nForConditionalGeneration", "Llama4ForConditionalGeneration"]
)
def test_other_multimodal_models_are_refused_by_name(architecture, tmp_path):
    config = getattr(transformers, architecture).config_class(architectures=[architecture])
    config.save_pretrained(tmp_path)
    with pytest.raises(CaesuraError, match=architecture) as caught:
        load_model_config(tmp_path, "auto")
    assert caught.value.code == "unsupported_model"
