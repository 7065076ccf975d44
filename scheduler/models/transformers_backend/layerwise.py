"""A decoder's forward with stops between its layers, by the model's own code around them.

The decoder runs with layers that only note what they are called with; then each layer runs alone; then the
decoder runs with layers that hand on the last one's result, which leaves what follows them (the norm).

Invariant: what a layer is called with beside the hidden states follows from token ids and positions alone.
The check at load compares with the forward that does not stop.
"""

import copy
from collections.abc import Generator
from typing import Any

from torch import Tensor, nn

from .probe import Probe


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        # Not registered: it is asked for its attributes only.
        self.__dict__["_layer"] = layer
        self._returns_tuple = returns_tuple
        self.called: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.result: Tensor | None = None

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        if self.result is None:
            self.called = args, options
            self.first = hidden
        out = hidden if self.result is None else self.result
        return (out,) if self._returns_tuple else out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


class LayerByLayer:
    def __init__(self, decoder: nn.Module, probe: Probe) -> None:
        self._real = probe.layers
        self._noting = [_Layer(layer, probe.returns_tuple) for layer in self._real]
        self._decoder = copy.copy(decoder)
        self._decoder._modules = {
            name: nn.ModuleList(self._noting)
            if isinstance(each, nn.ModuleList) and list(each) == self._real
            else each
            for name, each in decoder._modules.items()
        }

    def steps(self, input_ids: Tensor, positions: Tensor) -> Generator[int, None, Tensor]:
        """Yield each layer's number before it is computed; return all hidden states, [T, hidden]."""
        self._run(input_ids, positions, None)
        hidden = self._noting[0].first
        calls = [layer.called for layer in self._noting]
        for number, (layer, called) in enumerate(zip(self._real, calls, strict=True)):
            yield number
            assert called is not None, "the decoder calls every layer"
            args, options = called
            out = layer(hidden, *args, **options)
            hidden = out[0] if isinstance(out, tuple) else out
        return self._run(input_ids, positions, hidden)

    def _run(self, input_ids: Tensor, positions: Tensor, result: Tensor | None) -> Tensor:
        for layer in self._noting:
            layer.result = result
        out = self._decoder(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        last: Tensor = out.last_hidden_state
        return last[0]
