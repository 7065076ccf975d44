// Attention of all tokens to all tokens of a sample, for transformers of images.
//
// A task is a head of a sample and some of its queries. It goes through the sample's positions in blocks and keeps, per query,
// the largest score, the sum of weights and the weighted sum of values (online softmax: Milakov and Gimelshein, 2018,
// arXiv:1805.02867). Both products count in words of four bytes, as those of attention.cpp do, and both have lanes that are
// columns: a block's keys are transposed, and of bfloat16 two positions' values lie side by side.
//
// Invariants:
// - A query's result depends on it and on the K and V of its sample alone, to the last bit: an output is one chain of sums over
//   ascending words, and blocks depend on the number of tokens alone.
// - bfloat16: weights are rounded before they meet V, and their sum is that of the rounded ones; sums are float.
#ifndef CAESURA_ISA

#include "operations.h"

#include <type_traits>

using namespace caesura;

namespace {

constexpr int64_t MOST_SIZE = 128, MOST_QUERIES = 192, MOST_KEYS = 320;  // of a head, a task, a block
constexpr int64_t PANEL = 64;                                            // keys beside each other; blocks are a multiple

// All [samples, tokens, heads, size], contiguous.
template <class E>
struct JointAttention {
    const E *q, *k, *v;
    E* out;
    int64_t tokens, heads, size;
    float scale;
};

// A thread's own memory.
struct Scratch {
    alignas(64) float keys[MOST_KEYS * MOST_SIZE];    // [panel, word, PANEL]
    alignas(64) float values[MOST_KEYS * MOST_SIZE];  // [word of positions, size]
    alignas(64) float sums[MOST_QUERIES * MOST_SIZE];
    float largest[MOST_QUERIES], weights[MOST_QUERIES];
};

}  // namespace

#define CAESURA_FILE "joint_attention.cpp"
#include "each_isa.h"

// A head is a multiple of 64 bytes, and of MOST_SIZE elements at most.
#define CAESURA_JOINT_ATTENTION(NAME, E)                                                                                  \
    CAESURA_API void caesura_joint_attention_##NAME(const E* q, const E* k, const E* v, E* out, int64_t samples,          \
                                                    int64_t tokens, int64_t heads, int64_t size, float scale,            \
                                                    int threads) {                                                        \
        const JointAttention<E> a = {q, k, v, out, tokens, heads, size, scale};                                           \
        const int64_t chunks = (tokens + MOST_QUERIES - 1) / MOST_QUERIES, tasks = samples * heads * chunks;              \
        run_team(threads, tasks > 1, [&](Team& team) {                                                                    \
            Scratch scratch;                                                                                              \
            team.each(tasks, [&](int64_t task, int64_t) {                                                                 \
                const int64_t chunk = task % chunks, head = task / chunks;                                                \
                CAESURA_DISPATCH(attend(a, scratch, head, tokens * chunk / chunks, tokens * (chunk + 1) / chunks));       \
            });                                                                                                           \
        });                                                                                                               \
    }
CAESURA_JOINT_ATTENTION(bf16, bf16)
CAESURA_JOINT_ATTENTION(f32, float)

#else

namespace CAESURA_ISA {

#include "word_tiles.h"

template <class E>
constexpr int64_t PAIR = 4 / sizeof(E);

// `count` keys from `k` on, zeros behind them up to a whole vector.
template <class E>
static void pack_keys(const E* k, int64_t row, int64_t count, int64_t size, float* keys) {
    const int64_t words = size / PAIR<E>;
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t word = 0; word < words; word += LANES) {
            F x[LANES];
            for (int64_t i = 0; i < LANES; i++)
                x[i] = first + i < count ? load_words(k + (first + i) * row + word * PAIR<E>) : zero();
            transpose(x);
            float* to = keys + first / PANEL * PANEL * words + word * PANEL + first % PANEL;
            for (int64_t i = 0; i < LANES; i++) store(to + i * PANEL, x[i]);
        }
}

static void pack_values(const float* v, int64_t row, int64_t count, int64_t size, float* values) {
    for (int64_t i = 0; i < count; i++) std::memcpy(values + i * size, v + i * row, size * sizeof(float));
}
// Behind an odd last position stand zeros.
static void pack_values(const bf16* v, int64_t row, int64_t count, int64_t size, float* values) {
    static const bf16 none[MOST_SIZE] = {};
    for (int64_t i = 0; i < count; i += 2, v += 2 * row, values += size)
        for (int64_t c = 0; c < size; c += 2 * LANES) {
            F low, high;
            interleave(v + c, (i + 1 < count ? v + row : none) + c, low, high);
            store(values + c, low), store(values + c + LANES, high);
        }
}

// R queries take in a block of `count` positions.
template <class E, int R>
static void tile(const JointAttention<E>& a, Scratch& s, const E* q, int64_t query, int64_t count) {
    const int64_t row = a.heads * a.size, words = a.size / PAIR<E>;
    alignas(64) float scores[R * MOST_KEYS];
    alignas(64) E weights[R * MOST_KEYS];
    for (int64_t key = 0; key < count; key += PANEL)
        multiply<E, R, TILE_VECTORS, true>((const float*)q, row / PAIR<E>, s.keys + key * words, PANEL, words, nullptr, scores + key,
                                           MOST_KEYS, smaller(PANEL, round_up(count - key, LANES)));
    float factors[R];
    for (int r = 0; r < R; r++) {
        float* line = scores + r * MOST_KEYS;
        const int64_t last = (count - 1) / LANES * LANES;
        F top = set1(s.largest[query + r]);
        for (int64_t i = 0; i < count; i += LANES) {
            F score = mul(load(line + i), set1(a.scale));
            if (i == last) score = keep_first(score, count - last, set1(-INFINITY));
            store(line + i, score);
            top = max(score, top);
        }
        const float largest = reduce_max(top), shift = largest == -INFINITY ? 0.0f : largest;
        F total = zero();
        for (int64_t i = 0; i < count; i += LANES) {
            const F x = exp(sub(load(line + i), set1(shift)));
            store(weights + r * MOST_KEYS + i, x);
            total = add(total, rounded(x, E()));
        }
        factors[r] = std::exp(s.largest[query + r] - shift);
        s.largest[query + r] = largest;
        s.weights[query + r] = s.weights[query + r] * factors[r] + reduce_add(total);
    }
    multiply<E, R>((const float*)weights, MOST_KEYS / PAIR<E>, s.values, a.size, (count + PAIR<E> - 1) / PAIR<E>, factors,
                   s.sums + query * a.size, a.size, a.size);
}

template <class E, int R>
static void tile_of(int64_t rows, const JointAttention<E>& a, Scratch& s, const E* q, int64_t query, int64_t count) {
    if (rows == R) return tile<E, R>(a, s, q, query, count);
    if constexpr (R > 1) tile_of<E, R - 1>(rows, a, s, q, query, count);
}

// Queries [begin, end) of a head; `head` counts the heads of all samples.
template <class E>
static void attend(const JointAttention<E>& a, Scratch& s, int64_t head, int64_t begin, int64_t end) {
    const int64_t row = a.heads * a.size, start = head / a.heads * a.tokens * row + head % a.heads * a.size, queries = end - begin;
    const E* q = a.q + start + begin * row;
    for (int64_t i = 0; i < queries; i++) s.largest[i] = -INFINITY, s.weights[i] = 0.0f;
    std::memset(s.sums, 0, queries * a.size * sizeof(float));
    const int64_t blocks = (a.tokens + MOST_KEYS - 1) / MOST_KEYS, block = round_up((a.tokens + blocks - 1) / blocks, PANEL);
    const int64_t tiles = (queries + TILE_ROWS<E> - 1) / TILE_ROWS<E>;
    for (int64_t first = 0; first < a.tokens; first += block) {
        const int64_t count = smaller(block, a.tokens - first);
        pack_keys(a.k + start + first * row, row, count, a.size, s.keys);
        pack_values(a.v + start + first * row, row, count, a.size, s.values);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t query = queries * i / tiles, after = queries * (i + 1) / tiles;
            tile_of<E, TILE_ROWS<E>>(after - query, a, s, q + query * row, query, count);
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        E* out = a.out + start + (begin + i) * row;
        const F inverse = set1(1.0f / s.weights[i]);
        for (int64_t c = 0; c < a.size; c += LANES) store(out + c, mul(load(s.sums + i * a.size + c), inverse));
    }
}

}  // namespace CAESURA_ISA

#endif
