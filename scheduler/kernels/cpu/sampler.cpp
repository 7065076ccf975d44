// One token per row of logits, with its log-probabilities: what execution/sampler.py does, whose docstring has the definitions and
// why the cumulative sum has two levels. Rows with top-k, top-p or min-p take the steps of sampler_filter.h after the second.
//
//     logits   | block 0: 256 entries | block 1 | ...          read once from memory, then from the cache
//     1. the largest of each block                              -> the row's largest, and where greedy rows look for it
//     2. sums of exp(scaled - largest), cumulative by block     -> total, the block that holds u * total
//     3. the entries of that block again, cumulative            -> the token
//
// Invariants:
// - A row is one task: its result does not depend on other rows or on the number of threads.
// - A token of probability 0 is never drawn: the target is kept below the total of the very sum that is searched, so the
//   entry found has raised it.
// - A row whose largest scaled logit is not finite, or that holds a NaN, gives token -1 and NaN.
#ifndef CAESURA_ISA

#include "operations.h"

#include <algorithm>

using namespace caesura;

namespace {

constexpr int64_t BLOCK = 256;
// Logits that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 14;
constexpr float NOT_A_NUMBER = __builtin_nanf("");

int64_t blocks_of(int64_t vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

// fraction * total, and strictly below total even where that rounds up.
CAESURA_INLINE double below(double fraction, double total) {
    const double target = fraction * total;
    return target < total ? target : std::nextafter(total, 0.0);
}

// First index whose cumulative sum exceeds `target`, which is below the last.
CAESURA_INLINE int64_t search(const double* cumulative, int64_t count, double target) {
    int64_t first = 0;
    while (count > 1) {
        const int64_t half = count / 2;
        if (cumulative[first + half - 1] <= target) {
            first += half;
            count -= half;
        } else {
            count = half;
        }
    }
    return first;
}

}  // namespace

#include "sampler_filter.h"

#define CAESURA_FILE "sampler.cpp"
#include "each_isa.h"

namespace {

Workspace workspace_of(double* workspace, int64_t vocabulary, const Team& team) {
    const int64_t blocks = blocks_of(vocabulary);
    return Workspace(workspace + team.thread * Workspace::size(blocks), blocks);
}

template <class E>
void all_rows(const Sampling& a, Team& team) {
    const Workspace work = workspace_of(a.workspace, a.vocabulary, team);
    team.each(a.rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(sample_row<E>(a, row, work)); });
}

template <class E>
void further_rows(const FurtherLogprobs& a, Team& team) {
    const Workspace work = workspace_of(a.workspace, a.vocabulary, team);
    team.each(a.count, [&](int64_t row, int64_t) { CAESURA_DISPATCH(further_row<E>(a, row, work)); });
}

}  // namespace

#define CAESURA_SAMPLE(NAME, E)                                                                                     \
    void caesura::sample(const Sampling& a, Team& team, E) { all_rows<E>(a, team); }                                \
    CAESURA_API void caesura_sample_##NAME(const void* sampling, int threads) {                                     \
        const Sampling& a = *(const Sampling*)sampling;                                                             \
        run_team(threads, a.rows * a.vocabulary > PARALLEL, [&](Team& team) { sample(a, team, E()); });             \
    }                                                                                                               \
    CAESURA_API void caesura_further_logprobs_##NAME(const void* further, int threads) {                            \
        const FurtherLogprobs& a = *(const FurtherLogprobs*)further;                                                \
        run_team(threads, a.count * a.vocabulary > PARALLEL, [&](Team& team) { further_rows<E>(a, team); });        \
    }
CAESURA_EACH_TYPE(CAESURA_SAMPLE)

// Doubles of workspace that each thread needs.
CAESURA_API int64_t caesura_sample_workspace(int64_t vocabulary) { return Workspace::size(blocks_of(vocabulary)); }

#else

namespace CAESURA_ISA {

// The `count` (1 to BLOCK) entries of one block as floats, in whole vectors padded by -inf; a copy only where needed.
template <class E>
CAESURA_INLINE void widen_block(const E* logits, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(logits + i));
    if (i < count) {
        store(out + i, set1(-INFINITY));
        store(out + i, load(logits + i, count - i), count - i);
    }
}

// exp(x / temperature - largest); UNIT: the temperature is 1.
template <bool UNIT>
CAESURA_INLINE F weight(F x, F temperature, F largest) {
    return exp(sub(UNIT ? x : div(x, temperature), largest));
}

// The largest logit of the row, NaN aside; `maxima` receives those of the blocks.
template <class E>
static float largest_logit(const E* logits, int64_t count, double* maxima) {
    float largest = -INFINITY;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const E* p = logits + begin;
        const int64_t n = smaller(BLOCK, count - begin);
        F first = set1(-INFINITY), second = first;
        int64_t i = 0;
        for (; i + 2 * LANES <= n; i += 2 * LANES) {
            first = max(load(p + i), first);
            second = max(load(p + i + LANES), second);
        }
        float block = reduce_max(max(first, second));
        for (; i < n; i++) {
            const float x = to_float(p[i]);
            block = x > block ? x : block;
        }
        maxima[begin / BLOCK] = block;
        largest = block > largest ? block : largest;
    }
    return largest;
}

// Sums of the weights over all blocks up to and including each, in double; returns the last. `cumulative` may be nullptr.
template <class E, bool UNIT>
static double sums(const E* logits, int64_t count, float temperature, float largest, double* cumulative) {
    const F t = set1(temperature), m = set1(largest);
    double total = 0;
    int64_t begin = 0;
    for (; begin + BLOCK <= count; begin += BLOCK) {
        F first = zero(), second = zero();
        for (int64_t i = begin; i < begin + BLOCK; i += 2 * LANES) {
            first = add(first, weight<UNIT>(load(logits + i), t, m));
            second = add(second, weight<UNIT>(load(logits + i + LANES), t, m));
        }
        total += reduce_add(add(first, second));
        if (cumulative) cumulative[begin / BLOCK] = total;
    }
    if (begin < count) {
        float rest[BLOCK];
        widen_block(logits + begin, count - begin, rest);
        F sum = zero();
        for (int64_t i = 0; i < count - begin; i += LANES) sum = add(sum, weight<UNIT>(load(rest + i), t, m));
        total += reduce_add(sum);
        if (cumulative) cumulative[begin / BLOCK] = total;
    }
    return total;
}

template <class E>
static double sums(const E* logits, int64_t count, float temperature, float largest, double* cumulative) {
    return temperature == 1.0f ? sums<E, true>(logits, count, temperature, largest, cumulative)
                               : sums<E, false>(logits, count, temperature, largest, cumulative);
}

// The inverse of the two-level cumulative distribution at `uniform`.
template <class E>
static int64_t draw(const Sampling& a, const E* logits, double uniform, float temperature, float largest,
                    const double* cumulative) {
    const double target = below(uniform, cumulative[blocks_of(a.vocabulary) - 1]);
    const int64_t block = search(cumulative, blocks_of(a.vocabulary), target), begin = block * BLOCK;
    const int64_t count = smaller(BLOCK, a.vocabulary - begin);
    float entries[BLOCK];
    widen_block(logits + begin, count, entries);
    const F t = set1(temperature), m = set1(largest);
    for (int64_t i = 0; i < count; i += LANES) store(entries + i, weight<false>(load(entries + i), t, m));
    double inner[BLOCK], total = 0;
    for (int64_t i = 0; i < count; i++) inner[i] = total += entries[i];
    // The block's own sum was added in another order: a fraction of it serves for this one, too.
    const double before = block ? cumulative[block - 1] : 0.0;
    const double fraction = (target - before) / (cumulative[block] - before);
    return begin + search(inner, count, below(fraction, total));
}

#include "sampler_filter.h"

static Filter filter_of(const Sampling& a, int64_t row) {
    if (!a.top_k || a.greedy[row]) return {a.vocabulary, 1.0, 0.0f};
    const int64_t top_k = a.top_k[row] > 1 ? a.top_k[row] : 1;
    return {smaller(top_k, a.vocabulary), (double)a.top_p[row], a.min_p ? a.min_p[row] : 0.0f};
}

// The row's logits after its edits, in `to`. `kept` holds those of the allowed tokens, 1,024 at most.
template <class E>
static void edit_row(const LogitEdits& edits, int64_t place, const E* logits, int64_t vocabulary, float* to, float* kept) {
    for (int64_t i = 0; i < vocabulary; i++) to[i] = to_float(logits[i]);
    if (place < edits.penalised) {
        const int32_t* counts = edits.counts + edits.counters[place] * vocabulary;
        const float repetition = edits.repetition[place], frequency = edits.frequency[place], presence = edits.presence[place];
        for (int64_t begin = 0; begin < vocabulary; begin += LANES) {
            const int64_t end = smaller(begin + LANES, vocabulary);
            int32_t any = 0;
            for (int64_t i = begin; i < end; i++) any |= counts[i];
            for (int64_t i = begin; any && i < end; i++) {
                if (counts[i] == 0) continue;
                const int32_t times = counts[i] >> 1;
                const float x = to[i] - frequency * (float)times - presence * (float)(times > 0);
                to[i] = x > 0 ? x / repetition : x * repetition;
            }
        }
    }
    const int64_t* ids = edits.bias_ids + place * edits.biases;
    for (int64_t i = 0; i < edits.biases; i++) to[ids[i]] += edits.bias[place * edits.biases + i];
    if (edits.allowed == 0 || !edits.restricted[place]) return;
    ids = edits.allowed_ids + place * edits.allowed;
    for (int64_t i = 0; i < edits.allowed; i++) kept[i] = to[ids[i]];
    for (int64_t i = 0; i < vocabulary; i++) to[i] = -INFINITY;
    for (int64_t i = 0; i < edits.allowed; i++) to[ids[i]] = kept[i];
}

// The log-probability of a token among logits as they are given.
template <class E>
static float raw_logprob(const E* logits, int64_t vocabulary, int64_t token, double* maxima) {
    const float largest = largest_logit(logits, vocabulary, maxima);
    const double total = sums(logits, vocabulary, 1.0f, largest, (double*)nullptr);
    return (float)((double)to_float(logits[token]) - (double)largest - std::log(total));
}

template <class E>
static void sample_from(const Sampling& a, const E* logits, int64_t row, const Workspace& work, bool edited) {
    const bool greedy = a.greedy[row];
    const Filter filter = filter_of(a, row);
    const bool filtered = filter.active(a.vocabulary);
    const float temperature = greedy || !a.temperature ? 1.0f : a.temperature[row];
    const float raw_largest = largest_logit(logits, a.vocabulary, work.blocks);
    const float largest = raw_largest / temperature;  // division keeps the order, so this is the largest scaled logit
    int64_t token = 0;
    if (greedy) {
        int64_t block = 0;
        while (block + 1 < blocks_of(a.vocabulary) && work.blocks[block] != raw_largest) block++;
        token = block * BLOCK;
        while (token + 1 < a.vocabulary && to_float(logits[token]) != raw_largest) token++;
    }
    // Filtered rows need their maxima yet.
    const double total = sums(logits, a.vocabulary, temperature, largest, filtered ? nullptr : work.blocks);
    // A NaN among the logits shows in the total.
    if (!std::isfinite(largest) || !std::isfinite(total)) {
        a.tokens[row] = -1;
        a.logprobs[row] = NOT_A_NUMBER;
        if (a.last_kept) a.last_kept[row] = -1;
        if (a.raw_logprobs) a.raw_logprobs[row] = NOT_A_NUMBER;
        if (a.sampled_logprobs) a.sampled_logprobs[row] = NOT_A_NUMBER;
        return;
    }
    double kept = total;
    int64_t last = greedy ? token : -1;
    if (filtered)
        token = draw_filtered<E>({logits, a.vocabulary, work.blocks, temperature, largest, 0, 0, work}, filter, total,
                                 a.uniforms[row], kept, last);
    else if (!greedy)
        token = draw(a, logits, a.uniforms[row], temperature, largest, work.blocks);
    bool is_kept = true;
    if (a.given && a.given[row] >= 0) {
        token = a.given[row];
        is_kept = last < 0 || to_item(to_float(logits[token]) / temperature, token) <=
                                  to_item(to_float(logits[last]) / temperature, last);
    }
    const float logit = to_float(logits[token]);
    const double distance = (double)(logit / temperature) - (double)largest + 0.0;  // 0 is never -0
    a.tokens[row] = token;
    if (a.last_kept) a.last_kept[row] = last;
    a.logprobs[row] = (float)(distance - std::log(total));
    if (a.sampled_logprobs)
        a.sampled_logprobs[row] = !is_kept ? -INFINITY : greedy ? 0.0f : (float)(distance - std::log(kept));
    if (!a.raw_logprobs || edited) return;
    const double raw_total =
        temperature == 1.0f ? total : sums(logits, a.vocabulary, 1.0f, raw_largest, (double*)nullptr);
    a.raw_logprobs[row] = (float)((double)logit - (double)raw_largest - std::log(raw_total));
}

template <class E>
static void sample_row(const Sampling& a, int64_t row, const Workspace& work) {
    const E* logits = (const E*)a.logits + row * a.stride;
    const int64_t place = a.edits ? a.edits->places[row] : -1;
    if (place < 0) return sample_from(a, logits, row, work, false);
    const LogitEdits& edits = *a.edits;
    edit_row(edits, place, logits, a.vocabulary, work.edited, (float*)work.items);
    sample_from(a, work.edited, row, work, true);
    const int64_t token = a.tokens[row];
    if (a.raw_logprobs && token >= 0) a.raw_logprobs[row] = raw_logprob(logits, a.vocabulary, token, work.blocks);
    if (place < edits.penalised) edits.counts[edits.counters[place] * a.vocabulary + larger(token, 0)] += 2;
}

template <class E>
static void further_row(const FurtherLogprobs& a, int64_t row, const Workspace& work) {
    const E* logits = (const E*)a.logits + a.rows[row] * a.stride;
    const float temperature = a.temperature[row];
    const float largest = largest_logit(logits, a.vocabulary, work.blocks) / temperature;
    const double total = std::log(sums(logits, a.vocabulary, temperature, largest, (double*)nullptr));
    const bool finite = std::isfinite(largest) && std::isfinite(total);
    const auto logprob = [&](int64_t token) {
        const double distance = (double)(to_float(logits[token]) / temperature) - (double)largest;
        return finite ? (float)(distance - total) : NOT_A_NUMBER;
    };
    const int64_t* ids = a.ids + row * a.others;
    for (int64_t i = 0; i < a.others; i++) a.logprobs[row * a.others + i] = logprob(ids[i]);
    if (finite && a.top) best_tokens<E>({logits, a.vocabulary, work.blocks, temperature, largest, 0, 0, work}, a.top, logprob);
    for (int64_t i = 0; i < a.top; i++) {
        a.top_ids[row * a.top + i] = (int32_t)(finite ? item_index(work.items[i]) : i);
        a.top_logprobs[row * a.top + i] = finite ? item_value(work.items[i]) : NOT_A_NUMBER;
    }
    if (!a.last_kept) return;
    const int64_t last = a.last_kept[row] < 0 ? a.vocabulary : a.last_kept[row];
    const float border = last == a.vocabulary ? -INFINITY : to_float(logits[last]) / temperature;
    uint8_t* kept = a.kept + row * a.vocabulary;
    for (int64_t i = 0; i < a.vocabulary; i++) {
        const float x = to_float(logits[i]) / temperature;
        kept[i] = (x > border) | ((x == border) & (i <= last) & (x > -INFINITY));
    }
}

}  // namespace CAESURA_ISA

#endif
