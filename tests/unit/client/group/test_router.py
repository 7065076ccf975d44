"""Which engine takes a request: load, cached prefixes and routing keys, without engines."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from caesura.client.group.router import (
    LOAD_MARGIN,
    MAX_PREFIXES,
    PREFIX_BLOCK,
    Router,
    current_routing_key,
    routed_by,
)


@dataclass
class Engine:
    name: str
    load: int = 0


def prompt(first: int, length: int = 4 * PREFIX_BLOCK) -> list[int]:
    return [first + position for position in range(length)]


def test_the_least_loaded_engine_takes_what_nothing_speaks_for():
    engines = [Engine("a", 3), Engine("b", 1), Engine("c", 2)]
    assert Router().choose(engines, prompt(0)).name == "b"


def test_a_prompt_follows_its_prefix_until_that_engine_is_overloaded():
    router, engines = Router(), [Engine("a"), Engine("b")]
    first = router.choose(engines, prompt(0))
    first.load = LOAD_MARGIN
    longer = [*prompt(0), *prompt(900, PREFIX_BLOCK)]
    assert router.choose(engines, longer) is first
    other = next(engine for engine in engines if engine is not first)
    assert router.choose(engines, longer, salt="another cache") is other
    assert router.choose(engines, prompt(500)) is other
    first.load = LOAD_MARGIN + 1
    assert router.choose(engines, longer) is other


def test_a_short_common_prefix_does_not_count():
    router, engines = Router(), [Engine("a"), Engine("b")]
    first = router.choose(engines, prompt(0, PREFIX_BLOCK))
    first.load = 1
    longer = [*prompt(0, PREFIX_BLOCK), *prompt(900, 5 * PREFIX_BLOCK)]
    assert router.choose(engines, longer) is not first


def test_engines_that_lost_their_cache_are_forgotten():
    router, engines = Router(), [Engine("a"), Engine("b")]
    first = router.choose(engines, prompt(0))
    first.load = 1
    router.forget(first.name)
    assert router.choose(engines, prompt(0)) is not first
    router.forget()
    engines[0].load, engines[1].load = 0, 1
    assert router.choose(engines, prompt(0)) is engines[0]


@given(st.lists(st.text(max_size=8), min_size=1, max_size=40, unique=True), st.integers(0, 4))
def test_only_the_keys_of_an_engine_that_leaves_move(keys, leaving):
    engines = [Engine(f"engine-{number}", load=number) for number in range(5)]
    before = {key: Router().choose(engines, [1], key=key).name for key in keys}
    rest = [engine for engine in engines if engine is not engines[leaving]]
    for key in keys:
        after = Router().choose(rest, [1], key=key).name
        assert after == before[key] or before[key] == engines[leaving].name


def test_keys_spread_over_engines():
    engines = [Engine(name) for name in "abcd"]
    assert {Router().choose(engines, [1], key=str(number)).name for number in range(64)} == set("abcd")


def test_a_routing_key_holds_in_its_block():
    with routed_by("outer"):
        with routed_by("inner"):
            assert current_routing_key() == "inner"
        assert current_routing_key() == "outer"
    assert current_routing_key() is None


def test_the_memory_of_prefixes_is_bounded():
    router, engines = Router(), [Engine("a"), Engine("b")]
    for number in range(MAX_PREFIXES // 2 + 10):
        router.choose(engines, [number, *prompt(0, 2 * PREFIX_BLOCK - 1)])
    assert len(router.seen) == MAX_PREFIXES


def test_a_key_is_any_text():
    engines = [Engine("a"), Engine("b")]
    for key in ("", "\0", "ключ", "\ud800", "x" * (1 << 20)):
        assert Router().choose(engines, prompt(0), key=key) is Router().choose(
            engines[::-1], prompt(1), key=key
        )
