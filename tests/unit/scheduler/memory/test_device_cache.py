"""Emptying through one door: what it reports, counts and survives."""

import pytest

from caesura.scheduler.memory.device_memory import DeviceCache

MIB = 1 << 20


class Device:
    """Reserved memory goes through ``readings``, then stays at the last one."""

    def __init__(self, *readings: int) -> None:
        self.readings = [reading * MIB for reading in readings]
        self.emptied = 0

    def memory_reserved(self) -> int:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def empty_cache(self) -> None:
        self.emptied += 1


def totals(cache: DeviceCache) -> dict[str, tuple[int, int]]:
    return {each.place: (each.count, each.freed_bytes) for each in cache.totals()}


def test_an_emptying_during_which_more_was_allocated_counts_as_nothing():
    cache = DeviceCache(Device(10, 12))
    assert cache.empty("idle").freed == 0
    assert totals(cache) == {"idle": (1, 0)}


def test_earlier_events_count_for_earlier_callers():
    cache = DeviceCache(Device(8, 6))
    assert cache.empty("release", reserved_before=100 * MIB).freed == 92 * MIB
    assert totals(cache) == {"release": (1, 92 * MIB)}


@pytest.mark.parametrize("broken", ["synchronize", "empty_cache"])
def test_a_device_in_any_state_does_not_stop_the_answer(caplog, broken):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device, noted = Device(10, 6), []
    if broken == "empty_cache":
        device.empty_cache = fail
    cache = DeviceCache(
        device,
        synchronize=fail if broken == "synchronize" else lambda: None,
        note_failure=lambda what, freed: noted.append((what, freed)),
    )
    cache.after_failure("step 3")
    assert noted == [("step 3", 0)]
    assert "could not be emptied" in caplog.text


def test_after_a_failure_the_history_hears_what_came_back():
    noted: list[tuple[str, int]] = []
    cache = DeviceCache(Device(10, 6), note_failure=lambda what, freed: noted.append((what, freed)))
    cache.after_failure("step 3")
    assert noted == [("step 3", 4 * MIB)]
