// q K^T of a tile and a page, and the weights that it gives. Included by attention.cpp for each instruction set.

// The positions of a block that a row sees.
struct Seen {
    int64_t first, end;
};

// Bent by the form's cap, if it has one.
CAESURA_INLINE F scaled(F score, const Form& form) {
    const F x = mul(score, set1(form.scale));
    return form.softcap > 0.0f ? mul(tanh(div(x, set1(form.softcap))), set1(form.softcap)) : x;
}

// Sums of R queries and KEYS keys over the words of a lane, to columns from `first` on; as many bytes as are read are
// fetched from `ahead` on, which moves. What meets all others stays in registers: of few rows the queries, else the keys.
template <class E, bool DIRECT, int KEYS, class K, int R>
CAESURA_INLINE void add_words(F (&sums)[R][4], int first, int64_t words, const float* queries, const K* key, const char*& ahead) {
    constexpr int FETCHED = 64 / (LANES * sizeof(K));  // vectors of keys for each line that is fetched
    F sum[R][KEYS];
    for (int r = 0; r < R; r++)
        for (int k = 0; k < KEYS; k++) sum[r][k] = zero();
    for (int64_t word = 0; word < words; word += LANES, ahead += KEYS * LANES * sizeof(K)) {
        Ready<E> query[R], line[KEYS];
        if constexpr (R <= 2) {
            for (int r = 0; r < R; r++) query[r] = ready(load_words(queries + r * words + word), Computed<E>());
            for (int k = 0; k < KEYS; k++) {
                line[k] = ready(load_word(key + k * words + word), Computed<E>());
                for (int r = 0; r < R; r++) sum[r][k] = dot(sum[r][k], query[r], line[k], Computed<E>());
                if (DIRECT && k % FETCHED == 0) prefetch(ahead + k * LANES * sizeof(K), 64);
            }
        } else {
            for (int k = 0; k < KEYS; k++) {
                line[k] = ready(load_word(key + k * words + word), Computed<E>());
                if (DIRECT && k % FETCHED == 0) prefetch(ahead + k * LANES * sizeof(K), 64);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                query[r] = ready(load_words(queries + r * words + word), Computed<E>());
                for (int k = 0; k < KEYS; k++) sum[r][k] = dot(sum[r][k], query[r], line[k], Computed<E>());
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int k = 0; k < KEYS; k++) sums[r][first + k] = sum[r][k];
}

// The scores of R queries and a page's keys. DIRECT: keys are read from where they lie, and the page at `later` is
// fetched meanwhile.
template <class E, int R, bool DIRECT>
static void score_page(const ScratchOf<E>& s, const float* queries, const Form& form, const void* keys,
                       const E* later, float* scores) {
    using K = std::conditional_t<DIRECT, Word<E>, float>;
    constexpr int KEYS = LANES == 16 || R <= 2 ? 4 : 2;  // whose sums fit the registers
    const K* key = (const K*)keys;
    const char* ahead = (const char*)later;
    for (int64_t first = 0; first < PAGE; first += LANES, scores += LANES) {
        F folded[R][FOLDS];
#pragma GCC unroll 1
        for (int fours = 0; fours < FOLDS; fours++, key += 4 * s.words) {
            F sum[R][4];
            for (int k = 0; k < 4; k += KEYS)
                add_words<E, DIRECT, KEYS>(sum, k, s.words, queries, key + k * s.words, ahead);
            for (int r = 0; r < R; r++) folded[r][fours] = fold(sum[r]);
        }
        for (int r = 0; r < R; r++) store(scores + r * BLOCK, scaled(join(folded[r]), form));
    }
}

// Raises a row's largest score to that of a block of which it sees some, and returns m - m', for the sums so far. In vectors
// of which it sees a part the rest becomes the lowest score: overwritten, not added to, as what lies there may be NaN.
static float raise_largest(float* scores, Seen seen, float& largest) {
    const F lowest = set1(-INFINITY);
    const int64_t begin = seen.first / LANES * LANES, last = (seen.end - 1) / LANES * LANES;
    if (seen.first > begin) store(scores + begin, keep_first(lowest, seen.first - begin, load(scores + begin)));
    if (seen.end < last + LANES) store(scores + last, keep_first(load(scores + last), seen.end - last, lowest));
    F top = lowest;
    for (int64_t i = begin; i < seen.end; i += LANES) top = max(load(scores + i), top);
    const float block_largest = reduce_max(top), before = largest;
    largest = block_largest > before ? block_largest : before;
    return before - largest;
}

// The weights of a row's scores, and their sum.
template <class E>
static float weigh(const float* scores, Seen seen, float largest, E* probabilities) {
    F total = zero();
    for (int64_t i = seen.first / LANES * LANES; i < seen.end; i += LANES) {
        const F x = exp(sub(load(scores + i), set1(largest)));
        store(probabilities + i, x);
        total = add(total, rounded(x, E()));
    }
    return reduce_add(total);
}

// The weights of `rows` rows, at most LANES; `factors`: for the sums so far. A row that sees nothing stays as it is.
template <class E>
CAESURA_INLINE void weigh_rows(const ScratchOf<E>& s, float* scores, int64_t row, int64_t rows, const Seen* seen, float* factors) {
    float falls[LANES] = {};
    for (int64_t r = 0; r < rows; r++)
        if (seen[r].first < seen[r].end) falls[r] = raise_largest(scores + r * BLOCK, seen[r], s.largest[row + r]);
    store(factors, exp(load(falls)));
    for (int64_t r = 0; r < rows; r++)
        if (seen[r].first < seen[r].end) {
            auto* probabilities = (Computed<E>*)s.probabilities + r * BLOCK;
            const float sum = weigh(scores + r * BLOCK, seen[r], s.largest[row + r], probabilities);
            s.weights[row + r] = s.weights[row + r] * factors[r] + sum;
        }
}
