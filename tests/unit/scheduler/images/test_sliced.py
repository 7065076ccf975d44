"""Calls in slices."""

import gc
import threading

import pytest

from caesura.scheduler.images.sliced import Sliced


def counting(places):
    """A call that notes each of four places, and may rest behind each."""

    def work(rest):
        for place in range(4):
            places.append(place)
            rest()
        return "made"

    return work


def test_a_call_goes_on_only_while_it_is_waited_for():
    places = []
    call = Sliced(counting(places))
    assert (places, call.done) == ([], False)
    for number in range(1, 5):
        assert not call.proceed(0.0)
        assert places == [*range(number)]
    assert call.proceed(0.0)
    assert call.proceed(0.0), "it has ended"
    assert call.result() == "made"


def test_a_budget_covers_several_places():
    places = []
    call = Sliced(counting(places))
    assert call.proceed(float("inf"))
    assert places == [0, 1, 2, 3]


def test_other_threads_rest_nowhere():
    rests = []

    def work(rest):
        rests.append(rest)
        rest()

    call = Sliced(work)
    assert not call.proceed(0.0)
    rests[0]()
    assert call.proceed(0.0)


def test_an_error_is_the_owners():
    def work(rest):
        rest()
        raise ValueError("no")

    call = Sliced(work)
    call.proceed(0.0)
    assert call.proceed(0.0)
    with pytest.raises(ValueError, match="no"):
        call.result()


@pytest.mark.parametrize("slices", [0, 2])
def test_a_call_ends_with_its_owner(slices):
    places, left = [], []

    def work(rest):
        try:
            counting(places)(rest)
        finally:
            left.append(threading.current_thread())

    before = {*threading.enumerate()}  # an engine of another test may not have been collected yet
    call = Sliced(work)
    (thread,) = {*threading.enumerate()} - before
    for _ in range(slices):
        call.proceed(0.0)
    del call
    gc.collect()
    assert not thread.is_alive()
    assert (len(places), len(left)) == (slices, min(slices, 1))
