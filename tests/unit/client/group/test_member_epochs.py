"""A member's own epochs beside the group's, compared with a plain list of all commits."""

from hypothesis import given
from hypothesis import strategies as st

from caesura.client.connection.async_channel import LoopSocket
from caesura.client.group.members import EngineAddress, Member


def member() -> Member:
    return Member(EngineAddress("tcp://127.0.0.1:1"), LoopSocket(), owner=None, keepalive_timeout=None)


@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(1, 3)), max_size=12))
def test_epochs_are_those_of_a_list_of_commits(steps):
    """Each step is a change of the own epoch (lower where somebody has adopted it), and of the group's."""
    ours, pairs, own, group = member(), [], 5, 3
    for up, further in steps:
        own, group = max(0, own + up), group + further
        ours.committed(own, group)
        pairs = [pair for pair in pairs if pair[0] < own] + [(own, group)]
        for epoch in range(-1, 50):
            older = [pair for pair in pairs if pair[0] <= epoch] or pairs[:1]
            assert ours.group_epoch(epoch) == older[-1][1]
            assert ours.has_given(epoch) == any(pair[0] == epoch for pair in pairs)
            assert ours.own_epoch(epoch) == (own if epoch <= group else None)


def test_commits_in_a_row_take_no_memory():
    ours = member()
    for step in range(1000):
        ours.committed(7 + step, 3 + step)
    assert len(ours._epochs) == 1
    assert ours.group_epoch(500) == 496
