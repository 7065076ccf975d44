"""Components that come and go in any order of verbs: values survive, and the account of bytes is exact."""

import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.moving_components import LAYERS, Model, accelerator, exhaust, host
from support.properties import examples

from caesura.scheduler.memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    ResidentStrategy,
)


@settings(max_examples=examples(40), stateful_step_count=30)
class AnyOrder(RuleBasedStateMachine):
    """Any order of verbs, on both kinds of places: values survive, and the account of bytes is exact."""

    @initialize(
        make=st.sampled_from([host, accelerator] if sys.platform == "linux" else [accelerator]),
        strategy=st.one_of(
            st.builds(ResidentStrategy),
            st.builds(ComponentOffloadStrategy),
            st.builds(LayerwiseOffloadStrategy, window=st.integers(1, LAYERS + 1)),
        ),
    )
    def build(self, make, strategy):
        self.manager, self.strategy = make(), strategy
        self.model = Model(self.manager, strategy)
        self.released = False
        self.moved = False

    def teardown(self):
        self.manager.close()

    @precondition(lambda self: not self.released)
    @rule()
    def use_all(self):
        self.model.one_pass()

    @precondition(lambda self: not self.released)
    @rule(layers=st.integers(0, LAYERS), steps=st.integers(0, 9))
    def give_up(self, layers, steps):
        bringing = self.manager.bring(["model"])
        for _ in range(steps):
            next(bringing, None)
        bringing.close()
        at_layer = self.manager.use("model")
        for number in range(layers):
            at_layer(number)
            self.model.check(number)

    @precondition(lambda self: not self.released)
    @rule()
    def leave(self):
        exhaust(self.manager.leave(["model"]))

    @rule(data=st.data(), value=st.integers(1, 200))
    def write(self, data, value):
        self.model.write(data.draw(st.integers(0, 2 * LAYERS)), value)

    @precondition(lambda self: not self.released)
    @rule()
    def release(self):
        exhaust(self.manager.release(["weights"]))
        self.released = True
        assert self.manager.device_bytes("model") == 0

    @precondition(lambda self: self.released)
    @rule()
    def resume(self):
        exhaust(self.manager.resume(["weights"]))
        self.released = False

    @invariant()
    def every_value_can_be_read(self):
        component = self.model.component
        for tensor, value in zip(self.model.tensors, self.model.values, strict=True):
            assert bool((component.values(tensor) == value).all())

    @invariant()
    def what_is_away_takes_no_memory(self):
        for unit in self.model.component.units:
            if unit.on_device and not unit._coming:
                assert all(bool(tensor.any()) for tensor in unit.tensors)
            if not unit.on_device:
                assert not any(t.untyped_storage().nbytes() and bool(t.any()) for t in unit.tensors)


TestAnyOrder = AnyOrder.TestCase
