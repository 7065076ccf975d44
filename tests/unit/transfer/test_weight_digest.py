from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from caesura.transfer import weight_digest
from caesura.transfer.weight_digest import TensorDigest, digest_of, tensor_digest, weights_digest

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
NUMBER = st.integers(0, 1 << 62)
SIZES = st.one_of(st.integers(1, 40), st.integers(4000, 20_000))


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_tensor(name: str, size: int, seed: int) -> torch.Tensor:
    data = random_bytes(size * DTYPES[name].itemsize, seed)
    return (data % 2 if name == "BOOL" else data).view(DTYPES[name])


def digest_in_python(tensor: torch.Tensor) -> list[int]:
    """Return the lanes as the module's docstring defines them."""

    def mixed(counter: int) -> int:
        state = counter * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    data += bytes(len(data) % 2)
    lanes = [0] * 4
    for i in range(len(data) // 2):
        x = int.from_bytes(data[2 * i : 2 * i + 2], "little", signed=True)
        k, j = divmod(i, 4096)
        for lane in range(4):
            a = int.from_bytes((mixed(4096 * lane + j) | 1).to_bytes(8, "little")[:2], "little", signed=True)
            b = (mixed(2**64 - 1 - (4 * k + lane + 1)) | 1) % 2**32
            lanes[lane] += a * b * x
    return [lane % 2**32 for lane in lanes]


@settings(max_examples=examples(20))
@given(st.sampled_from(sorted(DTYPES)), SIZES, NUMBER)
def test_lanes_are_those_of_the_definition(name, size, seed):
    tensor = random_tensor(name, size, seed)
    assert list(tensor_digest(tensor).settle()) == digest_in_python(tensor)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(DTYPES)), SIZES, NUMBER, st.lists(NUMBER, max_size=6), st.randoms())
def test_cuts_and_their_order_change_nothing(name, size, seed, cuts, random):
    tensor = random_tensor(name, size, seed)
    edges = sorted({0, size, *(cut % size for cut in cuts)})
    parts = list(pairwise(edges))
    random.shuffle(parts)
    digest, other = (TensorDigest(name, (size,)) for _ in range(2))
    for number, (start, stop) in enumerate(parts):
        (other if number % 2 else digest).add(start, tensor[start:stop])
    digest.merge(other.settle())
    assert digest == tensor_digest(tensor)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(DTYPES)), SIZES, NUMBER, st.data())
def test_a_change_is_the_digest_of_the_changed_tensor(name, size, seed, data):
    old, new = random_tensor(name, size, seed), random_tensor(name, size, seed + 1)
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=50))
    positions = torch.tensor(sorted(chosen), dtype=torch.int32)
    after = old.clone()
    after[positions.long()] = new[positions.long()]
    digest = tensor_digest(old)
    digest.change(positions, old[positions.long()], after[positions.long()])
    assert digest == tensor_digest(after)


@settings(max_examples=examples(60))
@given(st.sampled_from(sorted(DTYPES)), SIZES, NUMBER, NUMBER)
def test_every_flipped_bit_changes_every_lane(name, size, seed, bit):
    data = random_bytes(size * DTYPES[name].itemsize, seed)
    before = tensor_digest(data.view(DTYPES[name])).settle()
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    after = tensor_digest(data.view(DTYPES[name])).settle()
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_the_digest_of_weights_names_its_tensors():
    one, two = random_tensor("BF16", 96, 1), random_tensor("BF16", 96, 2)
    digest = digest_of({"a": one, "b": two})
    assert len(digest) == 32
    assert digest == digest_of({"b": two, "a": one})
    assert digest == weights_digest({"a": tensor_digest(one), "b": tensor_digest(two)})
    others = [
        digest_of({"a": two, "b": one}),
        digest_of({"a": one.view(2, 48), "b": two}),
        digest_of({"a": one.view(torch.float16), "b": two}),
        digest_of({"a": one}),
    ]
    assert len({digest, *others}) == 5


def test_scalars_and_empty_tensors_have_digests():
    assert tensor_digest(torch.tensor(1.5)).settle() == tensor_digest(torch.tensor([1.5])).settle()
    assert tensor_digest(torch.empty(0, 4)).settle() == (0, 0, 0, 0)


def test_threads_that_share_a_tensor_find_the_same():
    tensor = random_tensor("BF16", 3 * weight_digest._SHARED + 5, 1)
    alone = tensor_digest(tensor)
    torch.set_num_threads(3)
    try:
        assert tensor_digest(tensor) == alone
    finally:
        torch.set_num_threads(1)
