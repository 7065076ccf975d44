// The draw of a row that uses top-k, top-p or min-p: a part of sampler.cpp, which includes it before its instruction sets and
// within each. execution/sampler.py has the definitions.
//
//     largest       scaled logits, descending                                      reach
//     | bucket 0 | bucket 1 | ...  | bucket e: the kept end within it | ...          |     the rest is not read again
//     1. `reach`: how far below the largest everything lies that can be kept, from the maxima of the blocks, the total or min_p
//     2. one pass: how many tokens each bucket has, and the sum of their weights
//     3. the bucket e in which the last kept token lies, and the bucket that holds u * kept mass: sorted, walked
//
// Only these buckets are sorted (and a third, that of the k-th token, where top-p is relative to top-k), by a sort that is linear in
// their size, at worst the row's. Where few tokens can be kept, as with a small top-k, the steps from 2 on see these alone.
//
// Invariants:
// - The order is that of the scaled logits, of equal ones the lower index first: buckets never disagree with it, since a token's
//   bucket is a monotone function of its scaled logit.
// - Every token in a bucket has a weight above 0, so whatever is drawn has.
#ifndef CAESURA_ISA

namespace {

constexpr int64_t MAX_BUCKETS = 2048;
constexpr double LEAST_MASS = 1e-300;  // below every weight
constexpr double MAX_REACH = 87.336;   // at most the distance of the least weight
constexpr int64_t FEW = 128;           // tokens that become a row of their own, at most
constexpr int64_t RANKED = 64;         // tokens that are sorted by counting those before each, at most

// Sum of the weights, number of tokens: as one vector, since both change together.
using Bucket = double __attribute__((vector_size(16), aligned(8)));

// A thread's buffers, one after the other, 8 bytes an element; sampler.py allocates their sum.
struct Workspace {
    double* blocks;     // [ceil(vocabulary / BLOCK)] maxima, or cumulative sums
    Bucket* buckets;    // [MAX_BUCKETS]
    uint64_t* items;    // [vocabulary], to whole blocks
    uint64_t* scratch;  // the same
    float* edited;      // the same, of a row whose logits are edited

    static int64_t size(int64_t blocks) { return round_up(blocks, 8) + 2 * MAX_BUCKETS + 5 * blocks * BLOCK / 2; }
    Workspace(double* start, int64_t blocks)
        : blocks(start), buckets((Bucket*)(start + round_up(blocks, 8))), items((uint64_t*)(buckets + MAX_BUCKETS)),
          scratch(items + blocks * BLOCK), edited((float*)(scratch + blocks * BLOCK)) {}
};

// A token whose unsigned order is descending by value, then ascending by index. 0 and -0 are the same value.
CAESURA_INLINE uint64_t to_item(float value, int64_t index) {
    constexpr uint32_t SIGN = 0x80000000;
    uint32_t bits;
    value += 0.0f;
    std::memcpy(&bits, &value, sizeof bits);
    return (uint64_t)(bits & SIGN ? bits : ~(bits | SIGN)) << 32 | (uint64_t)index;
}

CAESURA_INLINE float item_value(uint64_t item) {
    constexpr uint32_t SIGN = 0x80000000;
    const uint32_t key = (uint32_t)(item >> 32), bits = key & SIGN ? key : ~(key | SIGN);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

CAESURA_INLINE int64_t item_index(uint64_t item) { return (int64_t)(item & 0xffffffff); }

// Sorts items that are ascending by index, by radix; the result lies in one of the two and is returned.
uint64_t* sort(uint64_t* items, uint64_t* scratch, int64_t count) {
    constexpr int DIGITS = 4, VALUES = 256;
    int64_t places[DIGITS][VALUES] = {};
    for (int64_t i = 0; i < count; i++)
        for (int digit = 0; digit < DIGITS; digit++) places[digit][items[i] >> (32 + 8 * digit) & 255]++;
    for (int digit = 0; digit < DIGITS; digit++) {
        int64_t* place = places[digit];
        const int shift = 32 + 8 * digit;
        if (count == 0 || place[items[0] >> shift & 255] == count) continue;  // all the same: nothing would move
        for (int64_t value = 0, next = 0; value < VALUES; value++) {
            const int64_t here = place[value];
            place[value] = next;
            next += here;
        }
        for (int64_t i = 0; i < count; i++) scratch[place[items[i] >> shift & 255]++] = items[i];
        uint64_t* const sorted = scratch;
        scratch = items;
        items = sorted;
    }
    return items;
}

// A bucket, and what comes before it.
struct Spot {
    int64_t bucket, count;
    double mass;
};

// The bucket with which `most` tokens or the mass `enough` are reached; the last that holds any where neither is.
Spot find(const Bucket* buckets, int64_t num_buckets, int64_t most, double enough) {
    Spot last = {0, 0, 0.0};
    int64_t count = 0;
    double mass = 0;
    for (int64_t i = 0; i < num_buckets; i++) {
        if (buckets[i][1] == 0) continue;
        last = {i, count, mass};
        count += (int64_t)buckets[i][1];
        mass += buckets[i][0];
        if (count >= most || mass >= enough) break;
    }
    return last;
}

// The least double that exceeds this one.
CAESURA_INLINE double above(double x) { return std::nextafter(x, (double)INFINITY); }

// A row's filters. Weights are exp(scaled - largest), so that the likeliest token has 1.
struct Filter {
    int64_t top_k;  // the vocabulary: unused
    double top_p;   // 1: unused
    float min_p;    // 0: unused

    bool by_k(int64_t vocabulary) const { return top_k < vocabulary; }
    bool active(int64_t vocabulary) const { return by_k(vocabulary) || top_p < 1 || min_p > 0; }

    // Returns a distance below the largest scaled logit within which every token lies that is kept or counts towards top-p, at
    // most that of the least weight. `kth`: the distance of the top_k-th largest block maximum, infinite with fewer blocks.
    double reach(int64_t vocabulary, double total, double kth) const {
        double reach = by_k(vocabulary) ? kth : INFINITY;
        if (!by_k(vocabulary) || top_p >= 1) {  // else the k best are needed whole: top-p is relative to their sum
            if (min_p > 0) reach = std::fmin(reach, std::fmax(0.0, -std::log((double)min_p)));
            // Farther tokens together have at most half of what may be missing.
            if (top_p < 1) reach = std::fmin(reach, std::log(2.0 * (double)vocabulary / ((1 - top_p) * total)));
        }
        // More, as float32 rounds distances and weights.
        return std::fmin(reach * 1.0001 + 1e-3, MAX_REACH);
    }
};

}  // namespace

#else

// A row that is filtered, and the measure of its buckets: token i lies (largest - logits[i] / temperature) * density deep, and
// in the bucket that is this, rounded down; none that is num_buckets deep or more is in any.
template <class E>
struct FilteredRow {
    const E* logits;
    int64_t vocabulary;
    const double* maxima;  // of the blocks, unscaled
    float temperature, largest;
    float density;
    int64_t num_buckets;
    Workspace work;
};

template <class E>
static bool block_begins_before(const FilteredRow<E>& row, int64_t begin, float depth) {
    return (row.largest - (float)row.maxima[begin / BLOCK] / row.temperature) * row.density < depth;
}

// Writes those of the lanes that are set one after the other, then whatever, LANES in all; returns how many are set. AVX-512 has
// one of its own.
template <class V>
static int64_t compress(float* p, V x, uint32_t lanes) {
    float all[LANES];
    store(all, x);
    int64_t count = 0;
    for (int i = 0; i < LANES; i++) {
        p[count] = all[i];
        count += lanes >> i & 1;
    }
    return count;
}

// Writes how far a block's tokens lie below the largest, in whole vectors padded by infinity; returns how many it has.
template <class E>
static int64_t distances(const FilteredRow<E>& row, int64_t begin, float* out) {
    const int64_t count = smaller(BLOCK, row.vocabulary - begin);
    const F t = set1(row.temperature), m = set1(row.largest);
    const E* logits = row.logits + begin;
    const bool unit = row.temperature == 1.0f;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const F x = load(logits + i);
        store(out + i, sub(m, unit ? x : div(x, t)));
    }
    if (i < count) {
        store(out + i, set1(INFINITY));
        store(out + i, sub(m, div(load(logits + i, count - i), t)), count - i);
    }
    return count;
}

// Counts and weighs the tokens of each bucket; returns how many weigh at least `least`, or no fewer than all where that is 0.
template <class E>
static int64_t fill_buckets(const FilteredRow<E>& row, float least) {
    const F density = set1(row.density), end = set1((float)row.num_buckets), low = set1(least);
    std::memset(row.work.buckets, 0, row.num_buckets * sizeof(Bucket));
    int64_t likely = least > 0 ? 0 : row.vocabulary;
    for (int64_t begin = 0; begin < row.vocabulary; begin += BLOCK) {
        if (!block_begins_before(row, begin, (float)row.num_buckets)) continue;
        float within[BLOCK + LANES], weights[BLOCK];
        int32_t places[BLOCK];
        const int64_t count = distances(row, begin, within);
        int64_t found = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            const F distance = load(within + i);
            found += compress(within + found, distance, negative(sub(mul(distance, density), end)));
        }
        store(within + found, set1(INFINITY));
        for (int64_t i = 0; i < found; i += LANES) {
            const F distance = load(within + i), weight = exp(sub(zero(), distance));
            if (least > 0) likely += LANES - __builtin_popcount(negative(sub(weight, low)));
            store(weights + i, weight);
            store(within + i, mul(distance, density));
        }
        for (int64_t i = 0; i < found; i++) places[i] = (int32_t)within[i];
#pragma GCC unroll 4
        for (int64_t i = 0; i < found; i++) row.work.buckets[places[i]] += Bucket{weights[i], 1.0};
    }
    return likely;
}

// Tokens in order.
struct Sorted {
    const uint64_t* items;
    const float* weights;
    int64_t count;
};

// The tokens of one bucket; work.items and work.scratch are overwritten.
template <class E>
static Sorted sorted_bucket(const FilteredRow<E>& row, int64_t bucket) {
    const F density = set1(row.density), from = set1((float)bucket), end = set1((float)(bucket + 1));
    const int64_t count = (int64_t)row.work.buckets[bucket][1];
    uint64_t *items = row.work.items, *scratch = row.work.scratch;
    for (int64_t begin = 0, found = 0; begin < row.vocabulary && found < count; begin += BLOCK) {
        if (!block_begins_before(row, begin, (float)(bucket + 1))) continue;
        float within[BLOCK];
        const int64_t entries = distances(row, begin, within);
        for (int64_t i = 0; i < entries; i += LANES) {
            const F depth = mul(load(within + i), density);
            for (uint32_t inside = negative(sub(depth, end)) & ~negative(sub(depth, from)); inside; inside &= inside - 1) {
                const int64_t token = begin + i + __builtin_ctz(inside);
                items[found++] = to_item(to_float(row.logits[token]) / row.temperature, token);
            }
        }
    }
    if (count <= RANKED) {
        for (int64_t i = 0; i < count; i++) {
            int64_t rank = 0;
            for (int64_t j = 0; j < count; j++) rank += items[j] < items[i];
            scratch[rank] = items[i];
        }
        items = scratch;
    } else {
        items = sort(items, scratch, count);
    }
    float* const weights = (float*)(items == scratch ? row.work.items : scratch);
    for (int64_t i = 0; i < count; i++) weights[i] = item_value(items[i]);
    for (int64_t i = 0; i < count; i += LANES) store(weights + i, exp(sub(load(weights + i), set1(row.largest))));
    return {items, weights, count};
}

// Returns the number of tokens, at most `most`, whose weights raise `mass` to `enough`.
static int64_t take(const Sorted& tokens, int64_t most, double enough, double& mass) {
    const int64_t end = smaller(tokens.count, most);
    for (int64_t i = 0; i < end; i++) {
        if (mass >= enough) return i;
        mass += tokens.weights[i];
    }
    return end;
}

// The distance from the largest scaled logit to the top_k-th largest block maximum.
template <class E>
static double kth_distance(const FilteredRow<E>& row, int64_t top_k) {
    const int64_t blocks = blocks_of(row.vocabulary);
    if (top_k > blocks) return INFINITY;
    for (int64_t i = 0; i < blocks; i++) row.work.items[i] = to_item((float)row.maxima[i], i);
    const float kth = item_value(sort(row.work.items, row.work.scratch, blocks)[top_k - 1]);
    return (double)(row.largest - kth / row.temperature);
}

// A distance within which top_k tokens lie at least and hardly more: as many of the BLOCK groups, of tokens at the same place of
// a block, begin there. Infinite with fewer groups.
template <class E>
static double kth_group(const FilteredRow<E>& row, int64_t top_k) {
    if (top_k > BLOCK) return INFINITY;
    float least[BLOCK], within[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += LANES) store(least + i, set1(INFINITY));
    for (int64_t begin = 0; begin < row.vocabulary; begin += BLOCK) {
        const int64_t count = distances(row, begin, within);
        for (int64_t i = 0; i < count; i += LANES) store(least + i, min(load(within + i), load(least + i)));
    }
    float low = 0, high = MAX_REACH;
    for (int halving = 0; halving < 12; halving++) {
        const float middle = (low + high) / 2;
        int64_t begun = 0;
        for (int64_t i = 0; i < BLOCK; i += LANES)
            begun += __builtin_popcount(negative(sub(load(least + i), set1(middle))));
        (begun >= top_k ? high : low) = middle;
    }
    return high;
}

// Copies the tokens that lie less than `depth` deep; returns how many, or more than FEW where there are more.
template <class E>
static int64_t shortlist(const FilteredRow<E>& row, float depth, E* logits, int64_t* indices) {
    const F density = set1(row.density), end = set1(depth);
    int64_t found = 0;
    for (int64_t begin = 0; begin < row.vocabulary && found <= FEW; begin += BLOCK) {
        if (!block_begins_before(row, begin, depth)) continue;
        float within[BLOCK];
        const int64_t count = distances(row, begin, within);
        for (int64_t i = 0; i < count && found <= FEW; i += LANES)
            for (uint32_t inside = negative(sub(mul(load(within + i), density), end)); inside; inside &= inside - 1) {
                const int64_t token = begin + i + __builtin_ctz(inside);
                logits[found] = row.logits[token];
                indices[found++] = token;
            }
    }
    return found;
}

// Draws at `uniform`; `mass` receives the sum of the kept weights, `last` the last kept token.
template <class E>
static int64_t draw_from(const FilteredRow<E>& row, const Filter& filter, bool by_k, double total, double uniform,
                         double& mass, int64_t& last) {
    const int64_t likely = fill_buckets(row, filter.min_p);
    const Bucket* buckets = row.work.buckets;

    Sorted open;  // the tokens of bucket `opened`
    int64_t opened = -1;
    double threshold = filter.top_p < 1 ? filter.top_p * total : (double)INFINITY;
    if (by_k && filter.top_p < 1) {
        const Spot kth = find(buckets, row.num_buckets, filter.top_k, INFINITY);
        open = sorted_bucket(row, opened = kth.bucket);
        double within_k = kth.mass;
        take(open, filter.top_k - kth.count, INFINITY, within_k);
        threshold = filter.top_p * within_k;
    }

    const int64_t most = smaller(filter.top_k, likely > 1 ? likely : 1);
    threshold = threshold > LEAST_MASS ? threshold : LEAST_MASS;  // at least one token is kept
    const Spot end = find(buckets, row.num_buckets, most, threshold);
    if (end.bucket != opened) open = sorted_bucket(row, opened = end.bucket);
    mass = end.mass;
    int64_t kept = take(open, most - end.count, threshold, mass);
    last = item_index(open.items[kept - 1]);

    const double enough = above(below(uniform, mass));  // the sum is to exceed the target
    const Spot drawn = find(buckets, end.bucket + 1, most, enough);
    if (drawn.bucket != end.bucket) {
        open = sorted_bucket(row, drawn.bucket);
        kept = open.count;
    }
    double sum = drawn.mass;
    return item_index(open.items[take(open, kept, enough, sum) - 1]);
}

// The same for a whole row; `work.blocks` holds the maxima. Few tokens that can be kept become a row of their own.
template <class E>
static int64_t draw_filtered(FilteredRow<E> row, const Filter& filter, double total, double uniform, double& mass,
                             int64_t& last) {
    const bool by_k = filter.by_k(row.vocabulary);
    row.largest += 0.0f;  // from -0 the distance of 0 would be -0, which has the sign of what lies before its bucket
    const double kth = by_k ? kth_distance(row, filter.top_k) : INFINITY;
    const double reach = filter.reach(row.vocabulary, total, kth);
    row.num_buckets = smaller(MAX_BUCKETS, 64 + row.vocabulary / 32);
    row.density = (float)((double)row.num_buckets / reach);

    // More than the group's distance, as that is rounded.
    const double within = by_k && kth > MAX_REACH ? kth_group(row, filter.top_k) * 1.0001 : INFINITY;
    E logits[FEW + LANES];
    int64_t indices[FEW + LANES];
    constexpr double largest = INFINITY;
    const float depth = (float)std::fmin((double)row.num_buckets, within * row.density);
    const int64_t found = shortlist(row, depth, logits, indices);
    if (found > FEW) return draw_from(row, filter, by_k, total, uniform, mass, last);
    row.logits = logits, row.vocabulary = found, row.maxima = &largest;
    const int64_t token = draw_from(row, filter, by_k, total, uniform, mass, last);
    last = indices[last];
    return indices[token];
}

// Puts the `count` tokens of the largest `value(token)`, which is monotone in their logits but for rounding, into work.items, in order.
template <class E, class Value>
static void best_tokens(FilteredRow<E> row, int64_t count, const Value& value) {
    row.largest += 0.0f;
    row.density = 1.0f;
    uint64_t* const items = row.work.items;
    int64_t found = 0;
    const auto put = [&](int64_t token) { items[found++] = to_item(value(token), token); };
    const double kth = count > BLOCK ? kth_distance(row, count) : kth_group(row, count);
    const float reach = kth < MAX_REACH ? (float)(kth * 1.0001 + 1e-3) : 0.0f;
    for (int64_t begin = 0; begin < row.vocabulary; begin += BLOCK) {
        if (!block_begins_before(row, begin, reach)) continue;
        float within[BLOCK];
        const int64_t entries = distances(row, begin, within);
        for (int64_t i = 0; i < entries; i += LANES)
            for (uint32_t inside = negative(sub(load(within + i), set1(reach))); inside; inside &= inside - 1)
                put(begin + i + __builtin_ctz(inside));
    }
    if (found < count)  // there is no such distance, or some lie farther away than what can be sampled
        for (found = 0; found < row.vocabulary;) put(found);
    std::partial_sort(items, items + count, items + found);
}

#endif
