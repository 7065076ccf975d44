// What surrounds the grouped products of linear.cpp: the choice of experts, pairs (token, expert) sorted by expert, and each
// token's weighted sum of what its experts made of it.
//
// Invariants:
// - A token's bits depend on that token alone: choice, weights and sum, which is taken in the order of its experts.
// - Pairs of one expert stay in the order of their tokens.
#ifndef CAESURA_ISA

#include "common.h"

namespace {

// Elements that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 15;

struct Route {
    const void* logits;  // [tokens, experts]
    int64_t* ids;        // [tokens, k]
    float* weights;      // [tokens, k]
    int64_t experts, k;
    bool normalize;
};

struct Combine {
    const void* y;          // [pairs, size], sorted
    const int64_t* places;  // [tokens, k]: rows of y
    const float* weights;   // [tokens, k]
    void* out;              // [tokens, size]
    int64_t k, size;
};

}  // namespace

#define CAESURA_FILE "experts.cpp"
#include "each_isa.h"

namespace {

template <class E>
void route(const Route& a, int64_t tokens, int threads) {
    const bool parallel = threads > 1 && tokens * a.experts > PARALLEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t token = 0; token < tokens; token++) CAESURA_DISPATCH(route_token<E>(a, token));
}

template <class E>
void combine(const Combine& a, int64_t tokens, int threads) {
    const bool parallel = threads > 1 && tokens * a.k * a.size > PARALLEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (parallel)
    for (int64_t token = 0; token < tokens; token++) CAESURA_DISPATCH(combine_token<E>(a, token));
}

}  // namespace

// The k largest logits of a token, the first ones of equal ones; its weights are softmax over all experts, over the chosen
// ones if `normalize`, rounded to the logits' type. NaN is chosen last and makes every weight NaN.
CAESURA_API void caesura_route_bf16(const void* logits, int64_t* ids, float* weights, int64_t tokens, int64_t experts,
                                    int64_t k, int normalize, int threads) {
    route<bf16>({logits, ids, weights, experts, k, normalize != 0}, tokens, threads);
}

CAESURA_API void caesura_route_f32(const void* logits, int64_t* ids, float* weights, int64_t tokens, int64_t experts,
                                   int64_t k, int normalize, int threads) {
    route<float>({logits, ids, weights, experts, k, normalize != 0}, tokens, threads);
}

// Sorts pairs, of which k in a row are of one token, by their expert. `tokens` and `places` [pairs]: the token of each
// sorted pair, and where each pair went. `hit` [experts] and `starts` [experts + 1]: the groups, each the expert and its
// first sorted pair, and the end of all. Returns how many groups; -1 where an id is not one of an expert.
CAESURA_API int64_t caesura_group(const int64_t* ids, int64_t pairs, int64_t k, int64_t experts, int64_t* tokens,
                                  int64_t* places, int64_t* hit, int64_t* starts, int64_t* next) {
    for (int64_t expert = 0; expert < experts; expert++) next[expert] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (ids[pair] < 0 || ids[pair] >= experts) return -1;
        next[ids[pair]]++;
    }
    int64_t groups = 0, start = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t count = next[expert];
        next[expert] = start;
        if (count) hit[groups] = expert, starts[groups++] = start;
        start += count;
    }
    starts[groups] = start;
    for (int64_t pair = 0; pair < pairs; pair++) {
        places[pair] = next[ids[pair]]++;
        tokens[places[pair]] = pair / k;
    }
    return groups;
}

CAESURA_API void caesura_combine_bf16(const void* y, const int64_t* places, const float* weights, void* out,
                                      int64_t tokens, int64_t k, int64_t size, int threads) {
    combine<bf16>({y, places, weights, out, k, size}, tokens, threads);
}

CAESURA_API void caesura_combine_f32(const void* y, const int64_t* places, const float* weights, void* out,
                                     int64_t tokens, int64_t k, int64_t size, int threads) {
    combine<float>({y, places, weights, out, k, size}, tokens, threads);
}

#else

namespace CAESURA_ISA {

// The largest logits in descending order, by insertion: nearly all of them stay below the least that is kept.
template <class E>
static void choose(const Route& a, const E* logits, int64_t* ids, float* kept) {
    int64_t count = 0;
    for (int64_t expert = 0; expert < a.experts; expert++) {
        const float logit = to_float(logits[expert]), value = logit == logit ? logit : -INFINITY;
        if (count == a.k && !(value > kept[count - 1])) continue;
        int64_t place = count < a.k ? count++ : count - 1;
        for (; place > 0 && value > kept[place - 1]; place--) kept[place] = kept[place - 1], ids[place] = ids[place - 1];
        kept[place] = value, ids[place] = expert;
    }
}

template <class E>
static void route_token(const Route& a, int64_t token) {
    const E* logits = (const E*)a.logits + token * a.experts;
    int64_t* ids = a.ids + token * a.k;
    float* weights = a.weights + token * a.k;
    choose(a, logits, ids, weights);
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
        E rounded[LANES];
        store(rounded, div(load(weights + i, n), set1(total)));
        store(weights + i, load(rounded), n);
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
            const E* p = y + places[j] * a.size + i;
            sum = fma(set1(weights[j]), n == LANES ? load(p) : load(p, n), sum);
        }
        n == LANES ? store(out + i, sum) : store(out + i, sum, n);
    }
}

}  // namespace CAESURA_ISA

#endif
