"""Components that come and go in any order of verbs: values survive, and the account of bytes is exact."""

import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.moving_components import LAYERS, USE, Model, accelerator, exhaust, host
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
            st.builds(ComponentOffloadStrategy, keep_after_use=st.booleans(), keep_on_warm_up=st.booleans()),
            st.builds(
                LayerwiseOffloadStrategy,
                window=st.integers(1, LAYERS + 1),
                keep_after_use=st.booleans(),
                keep_on_warm_up=st.booleans(),
            ),
        ),
    )
    def build(self, make, strategy):
        self.manager, self.strategy = make(), strategy
        self.model = Model(self.manager, strategy)
        self.open: set[str] = set()
        self.released = False
        self.moved = False

    def teardown(self):
        self.manager.close()

    @rule(request=st.sampled_from("rs"), warm_up=st.booleans())
    def begin(self, request, warm_up):
        self.manager.begin_request(request, warm_up=warm_up)
        self.open.add(request)

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data())
    def use_all(self, data):
        self.model.one_pass(data.draw(st.sampled_from(sorted(self.open))))

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data(), layers=st.integers(0, LAYERS), steps=st.integers(0, 9))
    def give_up(self, data, layers, steps):
        request = data.draw(st.sampled_from(sorted(self.open)))
        bringing = self.manager.before_stage(request, [USE])
        for _ in range(steps):
            next(bringing, None)
        bringing.close()
        at_layer = self.manager.use(request, USE)
        for number in range(layers):
            at_layer(number)
            self.model.check(number)

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(sorted(self.open)))
        exhaust(self.manager.finish_request(request))
        self.open.remove(request)

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
        component = self.manager._registered["model"]
        for tensor, value in zip(self.model.tensors, self.model.values, strict=True):
            assert bool((component.values(tensor) == value).all())

    @invariant()
    def what_is_away_takes_no_memory(self):
        units = self.manager._registered["model"].units
        for unit in units:
            if unit.on_device and not unit._coming:
                assert all(bool(tensor.any()) for tensor in unit.tensors)
            if not unit.on_device:
                assert not any(t.untyped_storage().nbytes() and bool(t.any()) for t in unit.tensors)


TestAnyOrder = AnyOrder.TestCase
