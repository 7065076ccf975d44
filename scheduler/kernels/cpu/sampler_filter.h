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
// their size, at worst the row's.
//
// Invariants:
// - The order is that of the scaled logits, of equal ones the lower index first: buckets never disagree with it, since a token's
//   bucket is a monotone function of its scaled logit.
// - Every token in a bucket has a weight above 0, so whatever is drawn has.
#ifndef CAESURA_ISA

namespace {

constexpr int64_t MAX_BUCKETS = 2048;
constexpr double LEAST_MASS = 1e-300;  // below every weight

struct Bucket {
    double mass;
    int64_t count;
};

// A thread's buffers, one after the other, 8 bytes an element; sampler.py allocates their sum.
struct Workspace {
    double* blocks;     // [ceil(vocabulary / 256)] maxima, or cumulative sums
    Bucket* buckets;    // [MAX_BUCKETS]
    uint64_t* items;    // [vocabulary]
    uint64_t* scratch;  // [vocabulary]
    float* edited;      // [vocabulary], of a row whose logits are edited

    static int64_t size(int64_t vocabulary, int64_t blocks) { return blocks + 2 * MAX_BUCKETS + 3 * vocabulary; }
    Workspace(double* start, int64_t vocabulary, int64_t blocks)
        : blocks(start), buckets((Bucket*)(start + blocks)), items((uint64_t*)(buckets + MAX_BUCKETS)),
          scratch(items + vocabulary), edited((float*)(scratch + vocabulary)) {}
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
        if (buckets[i].count == 0) continue;
        last = {i, count, mass};
        count += buckets[i].count;
        mass += buckets[i].mass;
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
        return std::fmin(reach * 1.0001 + 1e-3, 87.336);
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

// Counts and weighs the tokens of each bucket; returns how many weigh at least `least`.
template <class E>
static int64_t fill_buckets(const FilteredRow<E>& row, float least) {
    const F t = set1(row.temperature), m = set1(row.largest), density = set1(row.density);
    const F end = set1((float)row.num_buckets), low = set1(least);
    std::memset(row.work.buckets, 0, row.num_buckets * sizeof(Bucket));
    int64_t likely = 0;
    for (int64_t begin = 0; begin < row.vocabulary; begin += BLOCK) {
        if (!block_begins_before(row, begin, (float)row.num_buckets)) continue;
        const int64_t count = smaller(BLOCK, row.vocabulary - begin);
        float entries[BLOCK];
        widen_block(row.logits + begin, count, entries);
        for (int64_t i = 0; i < count; i += LANES) {
            const F distance = sub(m, div(load(entries + i), t)), depth = mul(distance, density);
            uint32_t inside = negative(sub(depth, end));
            if (!inside) continue;
            const F weights = exp(sub(zero(), distance));
            likely += __builtin_popcount(inside & ~negative(sub(weights, low)));
            float depths[LANES], weight[LANES];
            store(depths, depth);
            store(weight, weights);
            for (; inside; inside &= inside - 1) {
                const int lane = __builtin_ctz(inside);
                Bucket& bucket = row.work.buckets[(int)depths[lane]];
                bucket.mass += weight[lane];
                bucket.count++;
            }
        }
    }
    return likely;
}

// The tokens of one bucket in order; work.items and work.scratch are overwritten, one of them is returned.
template <class E>
static const uint64_t* sorted_bucket(const FilteredRow<E>& row, int64_t bucket) {
    const F t = set1(row.temperature), m = set1(row.largest), density = set1(row.density);
    const F from = set1((float)bucket), end = set1((float)(bucket + 1));
    int64_t found = 0;
    for (int64_t begin = 0; begin < row.vocabulary && found < row.work.buckets[bucket].count; begin += BLOCK) {
        if (!block_begins_before(row, begin, (float)(bucket + 1))) continue;
        const int64_t count = smaller(BLOCK, row.vocabulary - begin);
        float entries[BLOCK];
        widen_block(row.logits + begin, count, entries);
        for (int64_t i = 0; i < count; i += LANES) {
            const F scaled = div(load(entries + i), t), depth = mul(sub(m, scaled), density);
            uint32_t inside = negative(sub(depth, end)) & ~negative(sub(depth, from));
            if (!inside) continue;
            store(entries + i, scaled);
            for (; inside; inside &= inside - 1) {
                const int64_t lane = i + __builtin_ctz(inside);
                row.work.items[found++] = to_item(entries[lane], begin + lane);
            }
        }
    }
    return sort(row.work.items, row.work.scratch, found);
}

// Returns the number of items, at most `most` of `count`, whose weights raise `mass` to `enough`.
static int64_t take(const uint64_t* items, int64_t count, float largest, int64_t most, double enough, double& mass) {
    const F m = set1(largest);
    const int64_t end = smaller(count, most);
    for (int64_t begin = 0; begin < end; begin += LANES) {
        const int64_t lanes = smaller(LANES, end - begin);
        float weights[LANES] = {};
        for (int64_t i = 0; i < lanes; i++) weights[i] = item_value(items[begin + i]);
        store(weights, exp(sub(load(weights), m)));
        for (int64_t i = 0; i < lanes; i++) {
            if (mass >= enough) return begin + i;
            mass += weights[i];
        }
    }
    return end;
}

// The distance from the largest scaled logit to the top_k-th largest block maximum.
template <class E>
static double kth_distance(const FilteredRow<E>& row, int64_t top_k) {
    const int64_t blocks = (row.vocabulary + BLOCK - 1) / BLOCK;
    if (top_k > blocks) return INFINITY;
    // Items are as many as tokens, hence enough.
    for (int64_t i = 0; i < blocks; i++) row.work.items[i] = to_item((float)row.maxima[i], i);
    const float kth = item_value(sort(row.work.items, row.work.scratch, blocks)[top_k - 1]);
    return (double)(row.largest - kth / row.temperature);
}

// Draws at `uniform`; `mass` receives the sum of the kept weights, `last` the last kept token. `work.blocks` holds the maxima.
template <class E>
static int64_t draw_filtered(FilteredRow<E> row, const Filter& filter, double total, double uniform, double& mass,
                             int64_t& last) {
    const bool by_k = filter.by_k(row.vocabulary);
    const double reach = filter.reach(row.vocabulary, total, by_k ? kth_distance(row, filter.top_k) : INFINITY);
    row.largest += 0.0f;  // from -0 the distance of 0 would be -0, which has the sign of what lies before its bucket
    row.num_buckets = smaller(MAX_BUCKETS, 64 + row.vocabulary / 32);
    row.density = (float)((double)row.num_buckets / reach);
    const int64_t likely = fill_buckets(row, filter.min_p);
    const Bucket* buckets = row.work.buckets;

    const uint64_t* items = nullptr;
    int64_t opened = -1;
    double threshold = filter.top_p < 1 ? filter.top_p * total : (double)INFINITY;
    if (by_k && filter.top_p < 1) {
        const Spot kth = find(buckets, row.num_buckets, filter.top_k, INFINITY);
        items = sorted_bucket(row, opened = kth.bucket);
        double within_k = kth.mass;
        take(items, buckets[opened].count, row.largest, filter.top_k - kth.count, INFINITY, within_k);
        threshold = filter.top_p * within_k;
    }

    const int64_t most = smaller(filter.top_k, likely > 1 ? likely : 1);
    threshold = threshold > LEAST_MASS ? threshold : LEAST_MASS;  // at least one token is kept
    const Spot end = find(buckets, row.num_buckets, most, threshold);
    if (end.bucket != opened) items = sorted_bucket(row, opened = end.bucket);
    mass = end.mass;
    int64_t kept = take(items, buckets[opened].count, row.largest, most - end.count, threshold, mass);
    last = item_index(items[kept - 1]);

    const double enough = above(below(uniform, mass));  // the sum is to exceed the target
    const Spot drawn = find(buckets, end.bucket + 1, most, enough);
    if (drawn.bucket != end.bucket) {
        items = sorted_bucket(row, drawn.bucket);
        kept = buckets[drawn.bucket].count;
    }
    double sum = drawn.mass;
    return item_index(items[take(items, kept, row.largest, kept, enough, sum) - 1]);
}

#endif
