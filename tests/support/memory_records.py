"""Records of an engine's memory as nobody measured them, for whoever shows one."""

from collections.abc import Sequence

from support.fake_scheduler import memory_event, status_reply

from caesura.client.memory_view.record import MemoryRecord
from caesura.io_struct import GetStatusReqInput, MemoryByTag, MemoryEvent, MemoryStretch

MIB = 1 << 20


def cycles(count: int, *, grows: int = 0, label: str = "step") -> list[MemoryEvent]:
    events = [memory_event(1, "start", detail="/models/tiny")]
    base = 100 * MIB
    for number in range(count):
        seq = len(events) + 1
        full = base + 5 * MIB + grows
        parts = dict.fromkeys(MemoryByTag.__struct_fields__, 0)
        parts |= {
            "runtime": 60 * MIB,
            "weights": 20 * MIB,
            "kv": number * grows,
            "other": full - 80 * MIB - number * grows,
        }
        common = {"reserved": full, "by_tag": MemoryByTag(**parts), "weights_epoch": number}
        update = f"disk, version '{label} {number}'"
        after = base + grows
        events += [
            memory_event(seq, "pause", detail="in_place", **{**common, "reserved": base + 5 * MIB}),
            memory_event(seq + 1, "update_begin", detail=update, **common),
            memory_event(seq + 2, "update_commit", detail=f"{update}, 9 tensors", **common),
            memory_event(
                seq + 3,
                "continue",
                returned=5 * MIB,
                residual=grows - 5 * MIB,
                **{**common, "reserved": after},
            ),
        ]
        base = after
    return events


def record_of(events: Sequence[MemoryEvent], older: Sequence[MemoryStretch] = ()) -> MemoryRecord:
    return MemoryRecord(status_reply(GetStatusReqInput()), events, older)
