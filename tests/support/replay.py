"""A forward pass of transformers with the experts that an engine has chosen, as a trainer replays them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers


class _ReplayedRouter(torch.nn.Module):
    """Given experts, weighted by the router's own softmax over all of them."""

    def __init__(self, router: torch.nn.Module, expert_ids: torch.Tensor) -> None:
        super().__init__()
        self._router, self._ids = router, expert_ids

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router = self._router
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, self._ids)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), self._ids


@contextmanager
def replayed(model: transformers.Qwen3MoeForCausalLM, expert_ids: torch.Tensor) -> Iterator[None]:
    """Let ``model`` take for token ``t`` and layer ``l`` the experts ``expert_ids[t, l]`` (int64, one
    sequence) in the block.
    """
    sparse = {i: layer.mlp for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    routers = {i: mlp.gate for i, mlp in sparse.items()}
    for i, mlp in sparse.items():
        mlp.gate = _ReplayedRouter(routers[i], expert_ids[:, i])
    try:
        yield
    finally:
        for i, mlp in sparse.items():
            mlp.gate = routers[i]


@torch.inference_mode()
def chosen_experts(model: transformers.Qwen3MoeForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Return the experts that ``model`` itself chooses for ``tokens``: int64 [T, layers, k], sorted."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output, i=i: found.__setitem__(i, output[2]))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    none = torch.zeros_like(next(iter(found.values())))
    rows = [found.get(i, none) for i in range(len(model.model.layers))]
    return torch.stack(rows, dim=1).sort(dim=-1).values


def output_logprobs(
    model: transformers.Qwen3MoeForCausalLM, prompt: list[int], output: list[int], expert_ids: torch.Tensor
) -> torch.Tensor:
    """Return log-probabilities of ``output`` after ``prompt``, routed as ``expert_ids`` [prompt + output - 1,
    layers, k].
    """
    tokens = torch.tensor([prompt + output])
    with replayed(model, expert_ids):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = torch.tensor(output)[:, None]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, chosen).squeeze(1)
