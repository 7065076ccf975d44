// Tokens of several sequences through a layer of the gated delta rule (attention/delta_rule.py has the formula): the short
// convolution, the step of the state, the gated norm.
//
// Invariants:
// - A task is one key head of one sequence, with the value heads that it serves. What it reads and writes of states is its own.
// - Tokens of a sequence are taken one by one: how they are cut into steps and segments changes no bit.
// - Arithmetic is float, and results are rounded where the torch code of layers/gated_delta.py rounds them: after the convolution, after
//   its silu, after the sigmoid of b, after the rule, after normalisation, after the weight.
// - A token's bits depend on that token and the state before it alone.
#ifndef CAESURA_ISA

#include "operations.h"

using namespace caesura;

namespace {

// Elements of a head, at most; kernels/delta.py has the same.
constexpr int64_t MAX_HEAD = 256;
// Elements of states that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 14;
// Tokens of a sequence that a task has converted at a time: the state's columns stay in the first cache while they pass.
constexpr int64_t BLOCK = 8;
// Added to the squares of queries and keys; attention/delta_rule.py has the same.
constexpr float LENGTH_EPS = 1e-6f;

}  // namespace

#define CAESURA_FILE "delta.cpp"
#include "each_isa.h"

#define CAESURA_DELTA(NAME, E)                                                                                            \
    void caesura::delta_step(const Delta& a, Team& team, E) {                                                             \
        /* The last chains are the longest: whoever begins them last is waited for. */                                    \
        team.each(a.num_chains * a.key_heads, [&](int64_t task, int64_t) {                                                \
            CAESURA_DISPATCH(key_head<E>(a, a.num_chains - 1 - task / a.key_heads, task % a.key_heads));                  \
        });                                                                                                               \
    }                                                                                                                     \
    CAESURA_API void caesura_delta_step_##NAME(const DeltaArguments* step, const void* x, const void* filters,            \
                                               const void* log_rate, const void* rate_bias, const void* norm, float eps,  \
                                               void* past, float* recurrent, void* out, int threads) {                    \
        const Delta a = {*step, x, filters, log_rate, rate_bias, norm, eps, past, recurrent, out};                        \
        int64_t tokens = 0;                                                                                               \
        for (int64_t s = a.chains[0]; s < a.chains[a.num_chains]; s++) tokens += a.segments[s].tokens;                    \
        const bool worth_it = tokens * a.key_size * a.values() > PARALLEL;                                                \
        run_team(threads, worth_it, [&](Team& team) { delta_step(a, team, E()); });                                       \
    }
CAESURA_EACH_TYPE(CAESURA_DELTA)

#else

namespace CAESURA_ISA {

#include "elementwise.h"

template <class E>
static float rounded_scalar(float x) {
    E lanes[LANES];
    store(lanes, set1(x));
    return to_float(lanes[0]);
}

// silu of some channels' convolution; their newest input is stored behind the others, of which the oldest is dropped.
template <bool WHOLE, class E>
CAESURA_INLINE void convolve_lanes(const Delta& a, const E* x, E* past, const E* filters, int64_t lanes, float* out) {
    const int64_t channels = a.channels(), kept = a.kernel - 1;
    F sum = zero();
    for (int64_t tap = 0; tap < kept; tap++) {
        const F input = get<WHOLE>(past + tap * channels, lanes);
        sum = add(sum, mul(input, get<WHOLE>(filters + tap * channels, lanes)));
        if (tap > 0) put<WHOLE>(past + (tap - 1) * channels, input, lanes);
    }
    const F newest = get<WHOLE>(x, lanes);
    sum = add(sum, mul(newest, get<WHOLE>(filters + kept * channels, lanes)));
    if (kept > 0) put<WHOLE>(past + (kept - 1) * channels, newest, lanes);
    put<WHOLE>(out, rounded(swish(rounded(sum, E()), 1.0f), E()), lanes);
}

template <class E>
static void convolve(const Delta& a, const E* x, E* past, int64_t channel, int64_t n, float* out) {
    const E* filters = (const E*)a.filters + channel;
    past += channel;
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) convolve_lanes<true>(a, x + c, past + c, filters + c, LANES, out + c);
    if (c < n) convolve_lanes<false>(a, x + c, past + c, filters + c, n - c, out + c);
}

// x becomes as long as `length`, but for LENGTH_EPS.
static void scale_to(float* x, int64_t n, float length) {
    F sum = zero();
    for (int64_t c = 0; c < n; c += LANES) {
        const F value = load(x + c, smaller(LANES, n - c));
        sum = fma(value, value, sum);
    }
    const F inverse = set1(1.0f / std::sqrt(reduce_add(sum) + LENGTH_EPS)), scale = set1(length);
    for (int64_t c = 0; c < n; c += LANES) {
        const int64_t lanes = smaller(LANES, n - c);
        store(x + c, mul(mul(load(x + c, lanes), inverse), scale), lanes);
    }
}

// The step of a state's columns that lie in so many vectors, the last of them with `lanes`.
template <int VECTORS, bool WHOLE>
static void columns(const Delta& a, float* state, const float* q, const float* k, const float* v, float decay, float beta,
                    float* out, int64_t lanes) {
    const F kept = set1(decay);
    F known[VECTORS], found[VECTORS];
    for (int i = 0; i < VECTORS; i++) known[i] = found[i] = zero();
    const float* from = state;
    for (int64_t j = 0; j < a.key_size; j++, from += a.value_size) {
        const F key = set1(k[j]);
        for (int i = 0; i < VECTORS; i++) known[i] = fma(key, mul(kept, get<WHOLE>(from + i * LANES, lanes)), known[i]);
    }
    for (int i = 0; i < VECTORS; i++) known[i] = mul(set1(beta), sub(get<WHOLE>(v + i * LANES, lanes), known[i]));
    float* to = state;
    for (int64_t j = 0; j < a.key_size; j++, to += a.value_size) {
        const F key = set1(k[j]), query = set1(q[j]);
        for (int i = 0; i < VECTORS; i++) {
            const F next = fma(key, known[i], mul(kept, get<WHOLE>(to + i * LANES, lanes)));
            put<WHOLE>(to + i * LANES, next, lanes);
            found[i] = fma(query, next, found[i]);
        }
    }
    for (int i = 0; i < VECTORS; i++) put<WHOLE>(out + i * LANES, found[i], lanes);
}

// Converted inputs of a block's tokens, a line of MAX_HEAD each.
struct Block {
    int64_t tokens;
    float q[BLOCK * MAX_HEAD], k[BLOCK * MAX_HEAD], v[BLOCK * MAX_HEAD], found[BLOCK * MAX_HEAD];
    float decay[BLOCK], beta[BLOCK];
};

template <int VECTORS, bool WHOLE>
static void block_columns(const Delta& a, float* state, Block& b, int64_t c, int64_t lanes) {
    for (int64_t t = 0; t < b.tokens; t++) {
        const int64_t line = t * MAX_HEAD;
        columns<VECTORS, WHOLE>(a, state + c, b.q + line, b.k + line, b.v + line + c, b.decay[t], b.beta[t], b.found + line + c,
                                lanes);
    }
}

// Takes one value head's state through a block, and reads it with each token's query.
static void step_state(const Delta& a, float* state, Block& b) {
    int64_t c = 0;
    if (b.tokens == 1)
        for (; c + 4 * LANES <= a.value_size; c += 4 * LANES) block_columns<4, true>(a, state, b, c, LANES);
    for (; c + 2 * LANES <= a.value_size; c += 2 * LANES) block_columns<2, true>(a, state, b, c, LANES);
    for (; c + LANES <= a.value_size; c += LANES) block_columns<1, true>(a, state, b, c, LANES);
    if (c < a.value_size) block_columns<1, false>(a, state, b, c, a.value_size - c);
}

template <class E>
static void gated_norm(const Delta& a, const float* x, const E* gate, E* out) {
    E stored[MAX_HEAD];
    for (int64_t c = 0; c < a.value_size; c += LANES)
        store(stored + c, load(x + c, smaller(LANES, a.value_size - c)), smaller(LANES, a.value_size - c));
    const E* weight = (const E*)a.norm;
    const float inverse = inverse_rms<E>(stored, nullptr, a.value_size, a.eps);
    for (int64_t c = 0; c < a.value_size; c += LANES) {
        const int64_t n = smaller(LANES, a.value_size - c);
        const F normed = rounded(normal<false, false>(stored + c, weight + c, inverse, n), E());
        store(out + c, mul(normed, swish(load(gate + c, n), 1.0f)), n);
    }
}

// A key head's part of the state in row `from` (NO_STATE: of a sequence without tokens) becomes that of row `to`.
template <class E>
static void copy_state(const Delta& a, int64_t head, int64_t from, int64_t to) {
    const int64_t channels = a.channels(), kept = a.kernel - 1, keys = a.key_heads * a.key_size, values = a.group * a.value_size;
    const int64_t parts[3][2] = {
        {head * a.key_size, a.key_size}, {keys + head * a.key_size, a.key_size}, {2 * keys + head * values, values}};
    for (int64_t tap = 0; tap < kept; tap++)
        for (const auto& part : parts) {
            E* target = (E*)a.past + (to * kept + tap) * channels + part[0];
            if (from == NO_STATE)
                std::memset(target, 0, part[1] * sizeof(E));
            else
                std::memcpy(target, (const E*)a.past + (from * kept + tap) * channels + part[0], part[1] * sizeof(E));
        }
    const int64_t size = a.group * a.key_size * a.value_size;
    float* target = a.recurrent + (to * a.key_heads + head) * size;
    if (from == NO_STATE)
        std::memset(target, 0, size * sizeof(float));
    else
        std::memcpy(target, a.recurrent + (from * a.key_heads + head) * size, size * sizeof(float));
}

// Tokens [first, first + b.tokens) of one sequence through row `state`, in place.
template <class E>
static void block_of(const Delta& a, Block& b, int64_t first, int64_t state, int64_t head) {
    const int64_t value_heads = a.key_heads * a.group, keys = a.key_heads * a.key_size, size = a.key_size * a.value_size;
    E* past = (E*)a.past + state * (a.kernel - 1) * a.channels();
    const auto part = [&](int64_t t, int i) {
        return (const E*)a.x + (first + t) * a.width + a.places[i].first + head * a.places[i].step;
    };
    for (int64_t t = 0; t < b.tokens; t++) {
        float *q = b.q + t * MAX_HEAD, *k = b.k + t * MAX_HEAD;
        convolve(a, part(t, 0), past, head * a.key_size, a.key_size, q);
        convolve(a, part(t, 1), past, keys + head * a.key_size, a.key_size, k);
        scale_to(q, a.key_size, 1.0f / std::sqrt((float)a.key_size));
        scale_to(k, a.key_size, 1.0f);
    }
    for (int64_t i = 0; i < a.group; i++) {
        const int64_t value = head * a.group + i;
        const float slope = expf(to_float(((const E*)a.log_rate)[value]));
        for (int64_t t = 0; t < b.tokens; t++) {
            convolve(a, part(t, 2) + i * a.value_size, past, 2 * keys + value * a.value_size, a.value_size, b.v + t * MAX_HEAD);
            b.beta[t] = rounded_scalar<E>(1.0f / (1.0f + expf(-to_float(part(t, 4)[i]))));
            const float shifted = to_float(part(t, 5)[i]) + to_float(((const E*)a.rate_bias)[value]);
            const float rate = shifted > 20.0f ? shifted : log1pf(expf(shifted));  // torch's softplus
            b.decay[t] = expf(-slope * rate);
        }
        step_state(a, a.recurrent + (state * value_heads + value) * size, b);
        for (int64_t t = 0; t < b.tokens; t++)
            gated_norm(a, b.found + t * MAX_HEAD, part(t, 3) + i * a.value_size,
                       (E*)a.out + ((first + t) * value_heads + value) * a.value_size);
    }
}

template <class E>
static void key_head(const Delta& a, int64_t chain, int64_t head) {
    Block b;
    for (int64_t s = a.chains[chain]; s < a.chains[chain + 1]; s++) {
        const Segment& segment = a.segments[s];
        if (segment.source != segment.target) copy_state<E>(a, head, segment.source, segment.target);
        for (int64_t at = 0; at < segment.tokens; at += BLOCK) {
            b.tokens = smaller(BLOCK, segment.tokens - at);
            block_of<E>(a, b, segment.first + at, segment.target, head);
        }
        if (segment.kept != NO_STATE) copy_state<E>(a, head, segment.target, segment.kept);
    }
}

}  // namespace CAESURA_ISA

#endif
