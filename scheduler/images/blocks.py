"""The blocks of a module that are brought to the device one after another while it computes.

Invariant: :attr:`Blocks.before` is called with a block's number before the block computes, whoever calls the module and however
often; blocks that a call passes by are never asked for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn


class Blocks:
    """The blocks of one module, in the order of computation as far as its kind tells."""

    def __init__(self, module: nn.Module) -> None:
        """Adds a hook to each block of ``module``."""
        self.before: Callable[[int], None] = lambda number: None
        self._modules = list(_blocks_of(module))
        for number, block in enumerate(self._modules):
            block.register_forward_pre_hook(partial(self._called, number))

    def tensors(self) -> list[list[Tensor]]:
        """Parameters and buffers of each block."""
        return [[*block.parameters(), *block.buffers()] for block in self._modules]

    def _called(self, number: int, block: nn.Module, args: Any) -> None:
        self.before(number)


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists of modules, which is how transformers of diffusers and of transformers are made.

    A tower for images within a text encoder comes last: prompts without images do not call it. So does the encoder of an
    autoencoder, of which steps call the decoder.
    """
    decoder: Any = getattr(module, "decoder", None)
    encoder: Any = getattr(module, "encoder", None)
    if all(hasattr(half, "mid_block") for half in (decoder, encoder)):
        yield from (decoder.mid_block, *decoder.up_blocks, *encoder.down_blocks, encoder.mid_block)
        return
    lists = list(_outermost_lists(module, ""))
    for _, entries in sorted(lists, key=lambda found: "visual" in found[0]):
        yield from entries


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield path + name, child
        else:
            yield from _outermost_lists(child, f"{path}{name}.")
