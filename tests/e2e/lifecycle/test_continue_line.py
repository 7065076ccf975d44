"""Each continue of a run with routing replay says at INFO what it gave back, and gives something back."""

import re

from support.checkpoints import make_checkpoint

from caesura.client import SamplingParams, launch_scheduler

CYCLES = 8
LINE = re.compile(r"INFO .*continue_generation: reserved ([\d.]+) MB -> ([\d.]+) MB \(freed (-?[\d.]+) MB\)")


def test_every_continue_says_what_it_gave_back_and_reserved_memory_does_not_climb(tmp_path):
    shape = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 4, "mlp_only_layers": []}
    folders = [tmp_path / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "qwen3-moe", seed=seed, **shape)
    params = SamplingParams(max_new_tokens=150, temperature=1.0, seed=3, ignore_eos=True, n=4)
    log = tmp_path / "engine.log"
    with launch_scheduler(
        folders[0], dtype="float32", num_threads=1, kv_pool_tokens=16384, log_path=log
    ) as client:
        for cycle in range(CYCLES):
            prompts = [[3 + (cycle + place) % 90 for place in range(40 + 8 * row)] for row in range(8)]
            outputs = client.generate(prompts, params, return_routed_experts=True)
            assert all(sample.routed_experts is not None for sample in outputs)
            client.pause(("abort", "retract", "in_place")[cycle % 3])
            client.update_weights_from_disk(folders[1 - cycle % 2])
            client.continue_generation()
    found = [tuple(map(float, figures)) for figures in LINE.findall(log.read_text())]
    assert len(found) == CYCLES
    assert all(abs(before - after - freed) < 0.11 for before, after, freed in found), "they are rounded"
    assert all(after <= before for before, after, _ in found)
    assert sum(freed for *_, freed in found) > 0.5
    after = [reserved for _, reserved, _ in found]
    assert max(after[CYCLES // 2 :]) <= max(after[: CYCLES // 2]) + 2.0, (
        "reserved memory climbs from cycle to cycle"
    )
