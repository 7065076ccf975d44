"""The ledger of state rows by itself: what is given up, what is not, and what its check finds."""

import numpy as np
import pytest

from caesura.scheduler.cache.allocator import LedgerError
from caesura.scheduler.cache.layer_ledgers import NO_ROW, StateRows

NO_PAGES = np.empty(0, np.int32)


def pages(*numbers):
    return np.asarray(numbers, np.int32)


def kept(rows, *numbers):
    for number in numbers:
        state = rows.open(NO_PAGES, 0)
        assert rows.promise(state, 0) is not None
        rows.keep(state, pages(number), 1, 0)
        rows.close(state)
    return rows


def test_the_state_kept_longest_ago_makes_room():
    rows = kept(StateRows(10, 6), 3, 4, 5)
    assert rows.shareable(pages(3, 4, 5)) == 3
    first = rows.open(NO_PAGES, 0)
    second = rows.open(pages(3), 1)  # pins what would go next
    third = rows.open(NO_PAGES, 0)
    assert rows.shareable(pages(3, 4, 5)) == 3
    assert rows.shareable(pages(3, 4)) == 1
    assert rows.usage() == (0, 2, 3, 5)
    rows.check([first, second, third], pages(3, 5))


def test_initial_state_stays_until_a_step_has_read_it():
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(pages(3), 1)
    other = rows.open(NO_PAGES, 0)
    assert rows.available == 0
    with pytest.raises(LedgerError, match="all 3 rows"):
        rows.open(NO_PAGES, 0)
    rows.launched(state, from_start=False)
    assert rows.available == 1
    rows.open(NO_PAGES, 0)
    assert rows.behind[3] == NO_ROW
    rows.close(other)


def test_the_last_row_is_taken_over_with_what_it_holds():
    rows = kept(StateRows(10, 3), 3)
    row = int(rows.behind[3])
    other = rows.open(NO_PAGES, 0)
    state = rows.open(pages(3), 1)
    assert (state.row, state.source, rows.behind[3]) == (row, 0, NO_ROW)
    rows.check([other, state], pages(3))
    rows.close(state)
    rows.close(other)
    assert rows.usage() == (2, 0, 0, 2)


def test_a_step_that_writes_to_a_spare_row_can_be_rolled_back():
    rows = StateRows(10, 8)
    state = rows.open(NO_PAGES, 0)
    first = state.row
    rows.launched(state, from_start=True)
    rows.completed(state)
    written = []
    for _ in range(2):
        rows.reserve(state, take_kept=False)
        rows.launched(state, from_start=False)
        written.append(state.row)
        rows.check([state], NO_PAGES)
    assert len({first, *written}) == 3
    rows.rolled_back(state)
    assert (state.row, state.lost, list(state.before)) == (written[0], False, [first])
    rows.rolled_back(state)
    assert (state.row, state.lost, rows.usage().held) == (first, False, 1)
    rows.reserve(state, take_kept=False)
    rows.launched(state, from_start=False)
    rows.completed(state)
    assert (state.row != first, rows.usage().held) == (True, 1)
    rows.check([state], NO_PAGES)


def test_a_step_that_overwrites_a_state_loses_it_and_no_other_does():
    rows = StateRows(10, 8)
    state = rows.open(NO_PAGES, 0)
    rows.launched(state, from_start=True)
    rows.rolled_back(state)
    assert not state.lost, "nothing was there"
    rows.launched(state, from_start=False)
    rows.rolled_back(state)
    assert state.lost
    again = rows.open(NO_PAGES, 0)
    rows.reserve(again, take_kept=False)
    rows.launched(again, from_start=False)
    rows.launched(again, from_start=False)
    rows.rolled_back(again)
    assert again.lost
    rows.rolled_back(again)
    assert not again.lost, "that was the row which the first of the two wrote"
    for each in (state, again):
        rows.close(each)
    assert rows.usage() == (7, 0, 0, 7)


def test_a_spare_row_is_no_other_request_s_last_and_may_cost_a_kept_state():
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(NO_PAGES, 0)
    rows.reserve(state, take_kept=False)
    assert state.spare == NO_ROW, "one is free, and another request may want it"
    rows.reserve(state, take_kept=True)
    assert state.spare != NO_ROW
    other = rows.open(NO_PAGES, 0)
    rows.reserve(other, take_kept=True)
    assert (other.spare, rows.behind[3]) == (NO_ROW, NO_ROW)
    rows.unreserve(state)
    assert (state.spare, rows.usage()) == (NO_ROW, (1, 0, 2, 3))
    rows.check([state, other], NO_PAGES)


def test_a_request_that_begins_from_a_kept_state_has_no_spare_row():
    rows = kept(StateRows(10, 8), 3)
    state = rows.open(pages(3), 1)
    rows.reserve(state, take_kept=True)
    rows.launched(state, from_start=False)
    rows.rolled_back(state)
    assert state.lost


def test_a_promise_counts_when_its_step_has_been_completed():
    rows = StateRows(10, 6)
    state = rows.open(NO_PAGES, 0)
    assert rows.promise(state, 1) == rows.promise(state, 1)
    rows.keep(state, pages(7, 8), 1, 0)
    assert not rows.behind.any()
    rows.close(state)  # as after a step whose results are lost
    rows.keep(state, pages(7, 8), 2, 0)
    assert not rows.behind.any()
    state = rows.open(NO_PAGES, 0)
    rows.promise(state, 0)
    rows.keep(state, pages(7, 8), 1, 0)
    rows.promise(state, 1)
    rows.keep(state, pages(7, 8), 2, 0)
    assert rows.behind[[7, 8]].astype(bool).tolist() == [False, True], "of its own a request keeps the last"
    rows.replace(pages(7, 8), pages(7, 2))
    rows.forget(pages(8))
    assert rows.behind[2] != NO_ROW
    rows.check([state], pages(2, 7))
    rows.close(state)
    rows.forget(pages(2, 7))
    assert rows.usage() == (5, 0, 0, 5)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda rows, state: rows._allocator.allocate(1), "not exactly one thing"),
        (lambda rows, state: rows.behind.__setitem__(5, rows.behind[3]), "not exactly one thing"),
        (lambda rows, state: setattr(rows, "_held", 7), "counted 7"),
        (lambda rows, state: setattr(state, "source", 3), "pinned"),
        (lambda rows, state: None, "states of free pages"),
    ],
)
def test_the_check_finds_what_is_wrong(spoil, found):
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(NO_PAGES, 0)
    rows.check([state], pages(3))
    spoil(rows, state)
    with pytest.raises(LedgerError, match=found):
        rows.check([state], NO_PAGES)
