"""A trainer that knows nothing but HTTP: it samples, learns (REINFORCE, to say even tokens) and sends its
weights back.

caesura serve --model DIR &
python examples/http_trainer.py http://127.0.0.1:30000 DIR
"""

import json
import os
import sys
import urllib.request
from typing import Any

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

PROMPT, SAMPLES, LENGTH, TEMPERATURE = [5, 6, 3], 64, 8, 4.0


def post(url: str, body: Any, kind: str = "application/json") -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": kind, "Authorization": f"Bearer {os.environ.get('CAESURA_ADMIN_KEY', '')}"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310  (whoever calls this knows the address)
    with urllib.request.urlopen(request, timeout=600) as reply:  # noqa: S310
        return json.load(reply)


def sample(url: str) -> tuple[torch.Tensor, str]:
    sampling = {"n": SAMPLES, "max_new_tokens": LENGTH, "ignore_eos": True, "temperature": TEMPERATURE}
    found = post(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    return torch.tensor([each["output_ids"] for each in found]), found[0]["meta_info"]["weight_version"]


def update(url: str, policy: torch.nn.Module, version: int) -> None:
    weights = {name: p.detach().contiguous() for name, p in policy.named_parameters()}
    post(f"{url}/pause_generation", {"mode": "retract", "lease_s": 60})  # it ends by itself if this dies
    path = f"{url}/update_weights_from_tensor?weight_version={version}"
    post(path, save(weights), "application/octet-stream")
    post(f"{url}/continue_generation", {})


def main(url: str, model_path: str, steps: int = 30) -> list[float]:
    # the other cores are the engine's: threads of both on one core wait for each other
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer, rewards = torch.optim.Adam(policy.parameters(), lr=5e-3), []
    for step in range(steps):
        tokens, version = sample(url)
        reward = (tokens % 2 == 0).float()
        rewards.append(reward.mean().item())
        logits = policy(torch.cat([torch.tensor([PROMPT] * SAMPLES), tokens], 1)).logits / TEMPERATURE
        logprobs = logits[:, len(PROMPT) - 1 : -1].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        optimizer.zero_grad()
        (-(reward - reward.mean()) * logprobs).mean().backward()
        optimizer.step()
        update(url, policy, version=step + 1)
        print(f"step {step}: sampled under weights {version}, reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
