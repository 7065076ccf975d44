// Operations around the grouped products of linear.cpp: the choice of experts, pairs (token, expert) sorted by expert, and each
// token's weighted sum of its experts' outputs.
//
// Invariants:
// - A token's bits depend on that token alone: choice, weights and sum, which is taken in the order of its experts.
// - Pairs of one expert stay in the order of their tokens.
// - Of equal logits, or groups, the first one is chosen. NaN is chosen last.
#ifndef CAESURA_ISA

#include "operations.h"

using namespace caesura;

namespace {

// Elements that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 15;

}  // namespace

#define CAESURA_FILE "experts.cpp"
#include "each_isa.h"

// Sorts pairs: one thread does, by counting.
void caesura::sort_pairs(const Sorting& a, Team& team) {
    team.each(1, [&](int64_t, int64_t) {
        for (int64_t expert = 0; expert < a.experts; expert++) a.next[expert] = 0;
        const auto is_held = [&](int64_t id) { return id >= a.first && id < a.first + a.experts; };
        for (int64_t pair = 0; pair < a.pairs; pair++)
            if (is_held(a.ids[pair])) a.next[a.ids[pair] - a.first]++;
        int64_t groups = 0, start = 0;
        for (int64_t expert = 0; expert < a.experts; expert++) {
            const int64_t count = a.next[expert];
            a.next[expert] = start;
            if (count) a.hit[groups] = expert, a.starts[groups++] = start;
            start += count;
        }
        a.starts[groups] = start;
        for (int64_t pair = 0; pair < a.pairs; pair++) {
            const bool held = is_held(a.ids[pair]);
            a.places[pair] = held ? a.next[a.ids[pair] - a.first]++ : -1;
            if (held) a.tokens[a.places[pair]] = pair / a.k;
        }
        *a.count = groups;
    });
}

void caesura::gather_pairs(const PairRows& a, Team& team) {
    team.each(a.pairs, [&](int64_t pair, int64_t) {
        std::memcpy((char*)a.out + pair * a.bytes, (const char*)a.x + a.tokens[pair] * a.bytes, a.bytes);
    });
}

// `tokens` and `places` [pairs]: the token of each sorted pair, and where each pair went. `hit` [experts] and `starts`
// [experts + 1]: the groups, each the expert (from `first` on) and its first sorted pair, and the end of all. Returns how many
// groups; -1 where an id is not one of `total` experts.
CAESURA_API int64_t caesura_group(const int64_t* ids, int64_t pairs, int64_t k, int64_t total, int64_t first, int64_t experts,
                                  int64_t* tokens, int64_t* places, int64_t* hit, int64_t* starts, int64_t* next) {
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] < 0 || ids[pair] >= total) return -1;
    int64_t count;
    const Sorting a = {ids, pairs, k, first, experts, tokens, places, hit, starts, next, &count};
    run_team(1, false, [&](Team& team) { sort_pairs(a, team); });
    return count;
}

#define CAESURA_EXPERTS(NAME, E)                                                                                           \
    void caesura::route(const Route& a, Team& team, E) {                                                                   \
        team.each(a.tokens, [&](int64_t token, int64_t) { CAESURA_DISPATCH(route_token<E>(a, token)); });                  \
    }                                                                                                                      \
    void caesura::combine(const Combine& a, Team& team, E) {                                                               \
        team.each(a.tokens, [&](int64_t token, int64_t) { CAESURA_DISPATCH(combine_token<E>(a, token)); });                \
    }                                                                                                                      \
    /* The k largest logits of a token; its weights are softmax over all experts, over the chosen ones if `normalize`,     \
       rounded to the logits' type. NaN makes every weight NaN. */                                                         \
    CAESURA_API void caesura_route_##NAME(const void* logits, int64_t* ids, float* weights, int64_t tokens,                \
                                          int64_t experts, int64_t k, int normalize, int threads) {                        \
        const Route a = {logits, ids, weights, nullptr, 0, 0, tokens, experts, k, normalize != 0};                         \
        run_team(threads, tokens * experts > PARALLEL, [&](Team& team) { route(a, team, E()); });                          \
    }                                                                                                                      \
    CAESURA_API void caesura_combine_##NAME(const void* y, const int64_t* places, const float* weights, void* out,         \
                                            int64_t tokens, int64_t k, int64_t size, int threads) {                        \
        const Combine a = {y, places, weights, out, tokens, k, size, false};                                               \
        run_team(threads, tokens * k * size > PARALLEL, [&](Team& team) { combine(a, team, E()); });                       \
    }
CAESURA_EACH_TYPE(CAESURA_EXPERTS)

// Logits are float, and become scores.
CAESURA_API void caesura_route_in_groups(float* logits, const float* bias, int64_t* ids, float* weights, int64_t tokens,
                                         int64_t experts, int64_t k, int64_t groups, int64_t top_groups, int sigmoid,
                                         int best_two, int normalize, float scale, int threads) {
    const Route a = {logits, ids, weights, nullptr, 0, 0, tokens, experts, k, normalize != 0,
                     groups, top_groups, sigmoid != 0, best_two != 0, bias, scale};
    run_team(threads, tokens * experts > PARALLEL, [&](Team& team) { route(a, team, float()); });
}

#else

namespace CAESURA_ISA {

// The k largest values in descending order, by insertion: nearly all of them stay below the least that is kept.
struct Best {
    int64_t k, *ids;
    float* kept;
    int64_t count = 0;

    void take(int64_t id, float x) {
        const float value = x == x ? x : -INFINITY;
        if (count == k && !(value > kept[count - 1])) return;
        int64_t place = count < k ? count++ : count - 1;
        for (; place > 0 && value > kept[place - 1]; place--) kept[place] = kept[place - 1], ids[place] = ids[place - 1];
        kept[place] = value, ids[place] = id;
    }
};

static void to_scores(const Route& a, float* logits) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < a.experts; i++) largest = logits[i] > largest ? logits[i] : largest;
    F sums = zero();
    for (int64_t i = 0; i < a.experts; i += LANES) {
        const int64_t n = smaller(a.experts - i, LANES);
        const F x = load(logits + i, n);
        if (a.sigmoid) {  // e^-x as a square: exp() ends before it overflows
            const F root = exp(mul(x, set1(-0.5f)));
            store(logits + i, div(set1(1.0f), fma(root, root, set1(1.0f))), n);
        } else {
            const F score = exp(sub(x, set1(largest)));
            store(logits + i, score, n);
            sums = add(sums, keep_first(score, n, zero()));
        }
    }
    if (a.sigmoid) return;
    total = reduce_add(sums);
    for (int64_t i = 0; i < a.experts; i += LANES) {
        const int64_t n = smaller(a.experts - i, LANES);
        store(logits + i, div(load(logits + i, n), set1(total)), n);
    }
}

// The best experts of the best groups: DeepSeek-V2 (arXiv:2405.04434, section 2.2.2), V3 (arXiv:2412.19437, section 2.1.2).
static void route_in_groups(const Route& a, int64_t token) {
    float *scores = (float*)a.logits + token * a.experts, *weights = a.weights + token * a.k;
    int64_t* ids = a.ids + token * a.k;
    to_scores(a, scores);
    const auto choice = [&](int64_t expert) { return a.bias ? scores[expert] + a.bias[expert] : scores[expert]; };
    const int64_t size = a.experts / a.groups;
    int64_t groups[MAX_GROUPS];
    float best[MAX_GROUPS];
    bool chosen[MAX_GROUPS] = {};
    Best top_groups{a.top_groups, groups, best};
    for (int64_t group = 0; group < a.groups; group++) {
        int64_t of_group[2];
        float values[2] = {0.0f, 0.0f};
        Best two{a.best_two ? 2 : 1, of_group, values};
        for (int64_t i = group * size; i < (group + 1) * size; i++) two.take(i, choice(i));
        top_groups.take(group, values[0] + values[1]);
    }
    for (int64_t i = 0; i < top_groups.count; i++) chosen[groups[i]] = true;
    Best experts{a.k, ids, weights};
    for (int64_t group = 0; group < a.groups; group++)
        for (int64_t i = group * size; chosen[group] && i < (group + 1) * size; i++) experts.take(i, choice(i));
    float total = 0.0f;
    for (int64_t i = 0; i < a.k; i++) weights[i] = scores[ids[i]], total += weights[i];
    for (int64_t i = 0; i < a.k; i++) weights[i] = (a.normalize ? weights[i] / (total + 1e-20f) : weights[i]) * a.scale;
}

template <class E>
static void route_by_softmax(const Route& a, int64_t token) {
    const E* logits = (const E*)a.logits + token * a.experts;
    int64_t* ids = a.ids + token * a.k;
    float* weights = a.weights + token * a.k;
    Best best{a.k, ids, weights};
    for (int64_t expert = 0; expert < a.experts; expert++) best.take(expert, to_float(logits[expert]));
    const F largest = set1(weights[0]);
    F sums = zero();
    for (int64_t i = 0; i < a.experts; i += LANES) {
        const int64_t n = smaller(a.experts - i, LANES);
        sums = add(sums, keep_first(exp(sub(load(logits + i, n), largest)), n, zero()));
    }
    float total = reduce_add(sums);
    for (int64_t i = 0; i < a.k; i += LANES) {
        const int64_t n = smaller(a.k - i, LANES);
        store(weights + i, exp(sub(load(weights + i, n), largest)), n);
    }
    if (a.normalize && total == total) {
        total = 0;
        for (int64_t i = 0; i < a.k; i++) total += weights[i];
    }
    for (int64_t i = 0; i < a.k; i += LANES) {
        const int64_t n = smaller(a.k - i, LANES);
        store(weights + i, rounded(div(load(weights + i, n), set1(total)), E()), n);
    }
}

template <class E>
static void route_token(const Route& a, int64_t token) {
    a.groups ? route_in_groups(a, token) : route_by_softmax<E>(a, token);
    for (int64_t i = 0; a.record && i < a.k; i++) {
        const int64_t id = a.ids[token * a.k + i], place = token * a.record_row + i;
        if (a.record_bytes == 1) ((uint8_t*)a.record)[place] = (uint8_t)id;
        if (a.record_bytes == 2) ((int16_t*)a.record)[place] = (int16_t)id;
    }
}

template <class E>
static void combine_token(const Combine& a, int64_t token) {
    const int64_t* places = a.places + token * a.k;
    const float* weights = a.weights + token * a.k;
    const E* y = (const E*)a.y;
    E* out = (E*)a.out + token * a.size;
    for (int64_t i = 0; i < a.size; i += LANES) {
        const int64_t n = smaller(a.size - i, LANES);
        F sum = zero();
        for (int64_t j = 0; j < a.k; j++) {
            if (places[j] < 0) continue;
            const E* p = y + places[j] * a.size + i;
            sum = fma(set1(weights[j]), n == LANES ? load(p) : load(p, n), sum);
        }
        if (a.adds) sum = add(rounded(sum, E()), n == LANES ? load(out + i) : load(out + i, n));
        n == LANES ? store(out + i, sum) : store(out + i, sum, n);
    }
}

}  // namespace CAESURA_ISA

#endif
