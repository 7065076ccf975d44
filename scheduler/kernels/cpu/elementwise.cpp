// Operations between the matrix products, each in one pass over memory: normalisation, rotation with the store of K and V,
// and the gate of the MLP.
//
// Invariants:
// - Arithmetic is float; results are rounded where torch's sequence of operations rounds them, so that bfloat16 and
//   fp16 come out as from layers/: after the residual, after normalisation, after the weight, after x * cos, after silu.
// - A row's bits depend on that row alone.
#ifndef CAESURA_ISA

#include "operations.h"

using namespace caesura;

namespace {

constexpr int64_t PAGE = 16;
// Elements that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 15;

}  // namespace

#define CAESURA_FILE "elementwise.cpp"
#include "each_isa.h"

#define CAESURA_ELEMENTWISE(NAME, E)                                                                                   \
    void caesura::rms_norm(const Norm& a, Team& team, E) {                                                             \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(norm_row<E>(a, row)); });                       \
    }                                                                                                                  \
    void caesura::last_norm(const LastNorm& a, Team& team, E) {                                                        \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(last_norm_row<E>(a, row)); });                  \
    }                                                                                                                  \
    void caesura::gate_rows(const Gate& a, int64_t first, int64_t end, E) {                                            \
        for (int64_t row = first; row < end; row++) CAESURA_DISPATCH(gate_row<E>(a, row));                             \
    }                                                                                                                  \
    void caesura::gate_mul(const Gate& a, Team& team, E) {                                                             \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(gate_row<E>(a, row)); });                       \
    }                                                                                                                  \
    void caesura::rope_rows(const Rope& a, int64_t head, int64_t first, int64_t end, E) {                              \
        for (int64_t token = first; token < end; token++) CAESURA_DISPATCH(rope_head<E>(a, token, head));              \
    }                                                                                                                  \
    void caesura::rope_store(const Rope& a, Team& team, E) {                                                           \
        const int64_t heads = a.heads + 2 * a.kv_heads;                                                                \
        team.each(a.tokens, [&](int64_t token, int64_t) {                                                              \
            for (int64_t head = 0; head < heads; head++) rope_rows(a, head, token, token + 1, E());                    \
        });                                                                                                            \
    }                                                                                                                  \
    void caesura::rotate_latents(const Latents& a, Team& team, E) {                                                    \
        team.each(a.tokens, [&](int64_t token, int64_t) { CAESURA_DISPATCH(latents_token<E>(a, token)); });            \
    }                                                                                                                  \
    void caesura::sigmoid_mul(const Sigmoid& a, Team& team, E) {                                                       \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(sigmoid_row<E>(a, row)); });                    \
    }                                                                                                                  \
    void caesura::gate_heads(const HeadGates& a, Team& team, E) {                                                      \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(gated_heads_row<E>(a, row)); });                \
    }                                                                                                                  \
    void caesura::add_rows(const AddRows& a, Team& team, E) {                                                          \
        team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(added_row<E>(a, row)); });                      \
    }                                                                                                                  \
    CAESURA_API void caesura_rotate_latents_##NAME(                                                                    \
        const void* q, int64_t q_token, const void* kv, int64_t kv_token, int64_t heads, int64_t nope, int64_t rope,   \
        int64_t latent, const void* norm, float eps, int interleaved, const void* cos, const void* sin,                \
        int64_t angles_row, void* queries, void* cells, int64_t tokens, int threads) {                                 \
        const Latents a = {q, q_token, kv, kv_token, heads, nope, rope, latent, norm, eps, interleaved != 0, cos, sin, \
                           angles_row, nullptr, nullptr, queries, cells, tokens};                                      \
        const bool worth_it = tokens * (heads * rope + latent) > PARALLEL;                                             \
        run_team(threads, worth_it, [&](Team& team) { rotate_latents(a, team, E()); });                                \
    }                                                                                                                  \
    CAESURA_API void caesura_sigmoid_mul_##NAME(void* x, const void* gate, int64_t rows, int64_t size, int threads) {  \
        run_team(threads, rows * size > PARALLEL, [&](Team& team) { sigmoid_mul({x, gate, rows, size}, team, E()); });  \
    }                                                                                                                  \
    CAESURA_API void caesura_gate_heads_##NAME(void* x, const void* gates, int64_t gates_row, int64_t gates_head,      \
                                               int64_t rows, int64_t heads, int64_t size, int threads) {               \
        const HeadGates a = {x, gates, gates_row, gates_head, rows, heads, size};                                      \
        run_team(threads, rows * heads * size > PARALLEL, [&](Team& team) { gate_heads(a, team, E()); });              \
    }                                                                                                                  \
    CAESURA_API void caesura_rms_norm_##NAME(const void* x, int64_t x_row, void* residual, int64_t residual_row,       \
                                             const void* weight, void* out, int64_t out_row, int64_t rows,             \
                                             int64_t size, float eps, int from_one, int threads) {                     \
        const Norm a = {x, x_row, residual, residual_row, weight, out, out_row, rows, size, eps, from_one != 0};       \
        run_team(threads, rows * size > PARALLEL, [&](Team& team) { rms_norm(a, team, E()); });                        \
    }                                                                                                                  \
    CAESURA_API void caesura_gate_mul_##NAME(const void* gate_up, int64_t row, void* out, int64_t out_row,             \
                                             int64_t rows, int64_t size, int bend, int threads) {                      \
        const Gate a = {gate_up, (const E*)gate_up + size, row, out, out_row, rows, size, bend};                       \
        run_team(threads, 2 * rows * size > PARALLEL, [&](Team& team) { gate_mul(a, team, E()); });                    \
    }                                                                                                                  \
    CAESURA_API void caesura_rope_store_##NAME(                                                                        \
        const void* qkv, int64_t qkv_token, int64_t heads, int64_t kv_heads, int64_t size, int64_t rotated,            \
        const void* q_weight, const void* k_weight, float eps, int from_one, const void* cos, const void* sin,         \
        int64_t angles_token, const int64_t* slots, void* keys, void* values, void* q, int64_t q_token, int64_t tokens,\
        int threads) {                                                                                                 \
        const Rope a = {qkv, qkv_token, size, heads, kv_heads, size, rotated, q_weight, k_weight, eps, from_one != 0, cos,   \
                        sin, angles_token, nullptr, slots, keys, values, q, q_token, tokens};                          \
        const bool worth_it = tokens * (heads + 2 * kv_heads) * size > PARALLEL;                                       \
        run_team(threads, worth_it, [&](Team& team) { rope_store(a, team, E()); });                                    \
    }
CAESURA_EACH_TYPE(CAESURA_ELEMENTWISE)

#else

namespace CAESURA_ISA {

#include "elementwise.h"

template <class E, bool FROM_ONE>
static void norm_row_of(const Norm& a, int64_t row) {
    const E* x = (const E*)a.x + row * a.x_row;
    E *residual = a.residual ? (E*)a.residual + row * a.residual_row : nullptr, *out = (E*)a.out + row * a.out_row;
    const E *weight = (const E*)a.weight, *source = residual ? residual : x;
    const float inverse = inverse_rms(x, residual, a.size, a.eps);
    int64_t c = 0;
    for (; c + LANES <= a.size; c += LANES)
        put<true>(out + c, normal<true, FROM_ONE>(source + c, weight + c, inverse, LANES), LANES);
    if (c < a.size)
        put<false>(out + c, normal<false, FROM_ONE>(source + c, weight + c, inverse, a.size - c), a.size - c);
}

template <class E>
static void norm_row(const Norm& a, int64_t row) {
    if (a.from_one) return norm_row_of<E, true>(a, row);
    norm_row_of<E, false>(a, row);
}

template <class E>
static void last_norm_row(const LastNorm& a, int64_t row) {
    const int64_t start = a.tokens[row] * a.size;
    E* out = (E*)a.out + row * a.size;
    std::memcpy(out, (const E*)a.residual + start, a.size * sizeof(E));
    norm_row<E>({(const E*)a.update + start, 0, out, 0, a.weight, out, 0, 1, a.size, a.eps, a.from_one}, 0);
}

template <int BEND, class E>
static void gate_row_of(const Gate& a, int64_t row) {
    const E *gate = (const E*)a.gate + row * a.row, *up = (const E*)a.up + row * a.row;
    E* out = (E*)a.out + row * a.out_row;
    int64_t c = 0;
    for (; c + LANES <= a.size; c += LANES) store(out + c, gated<BEND>(load(gate + c), load(up + c), E()));
    const int64_t n = a.size - c;
    if (n) store(out + c, gated<BEND>(load(gate + c, n), load(up + c, n), E()), n);
}

template <class E>
static void gate_row(const Gate& a, int64_t row) {
    switch (a.bend) {
        case SILU: return gate_row_of<SILU, E>(a, row);
        case GELU_TANH: return gate_row_of<GELU_TANH, E>(a, row);
        default: return gate_row_of<CLAMPED, E>(a, row);
    }
}

// One element of a head: as it is, or normalised and weighted.
enum HeadNorm : int { NO_NORM, WEIGHTED, WEIGHTED_FROM_ONE };

template <bool WHOLE, int NORM, class E>
CAESURA_INLINE F element(const E* x, const E* weight, float inverse, int64_t n) {
    if constexpr (NORM == NO_NORM) return get<WHOLE>(x, n);
    return rounded(normal<WHOLE, NORM == WEIGHTED_FROM_ONE>(x, weight, inverse, n), E());
}

// One head's elements i and half + i.
template <bool WHOLE, int NORM, class E>
CAESURA_INLINE void rotate_step(const E* x, const E* weight, float inverse, const E* cos, const E* sin, E* out,
                                int64_t half, int64_t n) {
    const F first = element<WHOLE, NORM>(x, weight, inverse, n);
    const F second = element<WHOLE, NORM>(x + half, weight + half, inverse, n);
    const F c = get<WHOLE>(cos, n), s = get<WHOLE>(sin, n);
    const F first_c = rounded(mul(first, c), E()), second_c = rounded(mul(second, c), E());
    put<WHOLE>(out, fma(mul(second, set1(-1.0f)), s, first_c), n);
    put<WHOLE>(out + half, fma(first, s, second_c), n);
}

template <int NORM, class E>
static void rotate_head(const E* x, const E* weight, float eps, const E* cos, const E* sin, E* out, int64_t size,
                        int64_t rotated) {
    const int64_t half = rotated / 2;
    const float inverse = NORM ? inverse_rms<E>(x, nullptr, size, eps) : 1.0f;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES)
        rotate_step<true, NORM>(x + i, weight + i, inverse, cos + i, sin + i, out + i, half, LANES);
    if (i < half)
        rotate_step<false, NORM>(x + i, weight + i, inverse, cos + i, sin + i, out + i, half, half - i);
    for (i = rotated; i + LANES <= size; i += LANES)
        put<true>(out + i, element<true, NORM>(x + i, weight + i, inverse, LANES), LANES);
    if (i < size) put<false>(out + i, element<false, NORM>(x + i, weight + i, inverse, size - i), size - i);
}

// A head of a token: a query to its buffer (which may be where it is), a key or a value to the token's slot.
template <class E>
static void rope_head(const Rope& a, int64_t token, int64_t head) {
    const int64_t queries = smaller(head, a.heads);
    const E* x = (const E*)a.qkv + token * a.qkv_token + queries * a.q_head + (head - queries) * a.size;
    const int64_t slot = a.slots[token], stored = (head - a.heads) % a.kv_heads;
    const int64_t place = ((slot / PAGE * a.kv_heads + stored) * PAGE + slot % PAGE) * a.size;
    if (head >= a.heads + a.kv_heads) {
        std::memcpy((E*)a.values + place, x, a.size * sizeof(E));
        return;
    }
    const int64_t angles = (a.positions ? a.positions[token] : token) * a.angles_row;
    const E *cos = (const E*)a.cos + angles, *sin = (const E*)a.sin + angles;
    const bool query = head < a.heads;
    E* out = query ? (E*)a.q + token * a.q_token + head * a.q_head : (E*)a.keys + place;
    const E* weight = (const E*)(query ? a.q_weight : a.k_weight);
    if (!weight) {
        rotate_head<NO_NORM>(x, x, 0.0f, cos, sin, out, a.size, a.rotated);
    } else if (a.from_one) {
        rotate_head<WEIGHTED_FROM_ONE>(x, weight, a.eps, cos, sin, out, a.size, a.rotated);
    } else {
        rotate_head<WEIGHTED>(x, weight, a.eps, cos, sin, out, a.size, a.rotated);
    }
}

// Pairs that are neighbours become pairs of halves.
template <class E>
static void pairs_apart(const E* x, E* out, int64_t size) {
    for (int64_t i = 0; i < size / 2; i++) out[i] = x[2 * i], out[size / 2 + i] = x[2 * i + 1];
}

template <class E>
static void rotate_part(const Latents& a, const E* x, const E* cos, const E* sin, E* out) {
    if (a.interleaved) {  // the result lies where the pairs were put: a step reads both halves of a pair before it writes them
        pairs_apart(x, out, a.rope);
        x = out;
    }
    rotate_head<NO_NORM>(x, x, 0.0f, cos, sin, out, a.rope, a.rope);
}

template <class E>
static void latents_token(const Latents& a, int64_t token) {
    const int64_t angles = (a.positions ? a.positions[token] : token) * a.angles_row, width = a.latent + a.rope;
    const E *cos = (const E*)a.cos + angles, *sin = (const E*)a.sin + angles;
    const E *q = (const E*)a.q + token * a.q_token, *kv = (const E*)a.kv + token * a.kv_token;
    E* query = (E*)a.queries + token * a.heads * width + a.latent;
    for (int64_t head = 0; head < a.heads; head++, q += a.nope + a.rope, query += width) rotate_part(a, q, cos, sin, query);
    E* cell = (E*)a.cells + (a.slots ? a.slots[token] : token) * width;
    norm_row<E>({kv, 0, nullptr, 0, a.norm, cell, 0, 1, a.latent, a.eps, false}, 0);
    rotate_part(a, kv + a.latent, cos, sin, cell + a.latent);
}

template <class E>
static void added_row(const AddRows& a, int64_t row) {
    const E* x = (const E*)a.x + row * a.size;
    E* y = (E*)a.y + a.tokens[row] * a.size;
    int64_t c = 0;
    for (; c + LANES <= a.size; c += LANES) put<true>(y + c, add(get<true>(y + c, LANES), get<true>(x + c, LANES)), LANES);
    if (c < a.size) put<false>(y + c, add(get<false>(y + c, a.size - c), get<false>(x + c, a.size - c)), a.size - c);
}

// e^-x is computed as a square, as in swish(), because exp() saturates before it overflows.
template <class E>
CAESURA_INLINE F sigmoid(F x, E type) {
    const F root = exp(mul(x, set1(-0.5f)));
    return rounded(div(set1(1.0f), fma(root, root, set1(1.0f))), type);
}

template <class E>
static void sigmoid_row(const Sigmoid& a, int64_t row) {
    const F weight = sigmoid(set1(to_float(((const E*)a.gate)[row])), E());
    E* x = (E*)a.x + row * a.size;
    int64_t c = 0;
    for (; c + LANES <= a.size; c += LANES) put<true>(x + c, mul(get<true>(x + c, LANES), weight), LANES);
    if (c < a.size) put<false>(x + c, mul(get<false>(x + c, a.size - c), weight), a.size - c);
}

template <class E>
static void gated_heads_row(const HeadGates& a, int64_t row) {
    E* x = (E*)a.x + row * a.heads * a.size;
    const E* gates = (const E*)a.gates + row * a.gates_row;
    for (int64_t head = 0; head < a.heads; head++, x += a.size, gates += a.gates_head) {
        int64_t c = 0;
        for (; c + LANES <= a.size; c += LANES)
            put<true>(x + c, mul(get<true>(x + c, LANES), sigmoid(get<true>(gates + c, LANES), E())), LANES);
        const int64_t n = a.size - c;
        if (n) put<false>(x + c, mul(get<false>(x + c, n), sigmoid(get<false>(gates + c, n), E())), n);
    }
}

}  // namespace CAESURA_ISA

#endif
