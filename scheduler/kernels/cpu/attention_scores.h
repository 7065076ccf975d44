// q K^T of a tile and a page, and the weights that it gives. Included by attention.cpp for each instruction set.

// The scores of R queries and a page's keys, not yet scaled. DIRECT: keys are read from where they lie, and the page at `later` is
// fetched meanwhile.
template <class E, int R, bool DIRECT>
static void score_page(const ScratchOf<E>& s, const float* queries, const void* keys, const E* later, float* scores) {
    using K = std::conditional_t<DIRECT, Word<E>, float>;
    constexpr int FETCHED = 64 / (LANES * sizeof(K));  // vectors of keys for each line that is fetched
    const K* key = (const K*)keys;
    const char* ahead = (const char*)later;
    for (int64_t first = 0; first < PAGE; first += LANES, scores += LANES) {
        F folded[R][FOLDS];
#pragma GCC unroll 1
        for (int fours = 0; fours < FOLDS; fours++, key += 4 * s.words) {
            F sum[R][4];
            for (int r = 0; r < R; r++)
                for (int k = 0; k < 4; k++) sum[r][k] = zero();
            for (int64_t word = 0; word < s.words; word += LANES, ahead += 4 * LANES * sizeof(K)) {
                F line[4];
                for (int k = 0; k < 4; k++) line[k] = load_word(key + k * s.words + word);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const F query = load_words(queries + r * s.words + word);
                    for (int k = 0; k < 4; k++) {
                        sum[r][k] = dot(sum[r][k], query, line[k], Computed<E>());
                        if (DIRECT && r == 0 && k % FETCHED == 0) prefetch(ahead + k * LANES * sizeof(K), 64);
                    }
                }
            }
            for (int r = 0; r < R; r++) folded[r][fours] = fold(sum[r]);
        }
        for (int r = 0; r < R; r++) store(scores + r * BLOCK, join(folded[r]));
    }
}

// The positions of a block that a row sees.
struct Seen {
    int64_t first, end;
};

// Bent by the form's cap, if it has one.
CAESURA_INLINE F scaled(F score, const Form& form) {
    const F x = mul(score, set1(form.scale));
    return form.softcap > 0.0f ? mul(tanh(div(x, set1(form.softcap))), set1(form.softcap)) : x;
}

// The weights of one row's scores, of which it sees some; returns m - m', for the sums so far.
template <class E>
static float weigh(const float* scores, Seen seen, const Form& form, float& largest, float& weights, E* probabilities) {
    constexpr int N = BLOCK / LANES;
    const F lowest = set1(-INFINITY);
    F x[N], top = lowest, total = zero();
    for (int i = 0; i < N; i++) {
        // Overwritten, not added to: what lies there may be NaN.
        x[i] = keep_first(scaled(load(scores + i * LANES), form), seen.end - i * LANES, lowest);
        if (seen.first > i * LANES) x[i] = keep_first(lowest, seen.first - i * LANES, x[i]);
        top = max(x[i], top);
    }
    const float block_largest = reduce_max(top), before = largest;
    largest = block_largest > before ? block_largest : before;
    for (int i = 0; i < N; i++) {
        x[i] = exp(sub(x[i], set1(largest)));
        store(probabilities + i * LANES, x[i]);
        total = add(total, rounded(x[i], E()));
    }
    weights = reduce_add(total);
    return before - largest;
}

// The weights of R rows; `factors`: for the sums so far. A row that sees nothing stays as it is.
template <class E, int R>
static void weigh_rows(const ScratchOf<E>& s, const Form& form, int64_t row, const Seen* seen, float* factors) {
    float falls[LANES] = {}, weights[R] = {};
    for (int r = 0; r < R; r++)
        if (seen[r].first < seen[r].end)
            falls[r] = weigh(s.scores + r * BLOCK, seen[r], form, s.largest[row + r], weights[r],
                             (Computed<E>*)s.probabilities + r * BLOCK);
    store(factors, exp(load(falls)));
    for (int r = 0; r < R; r++) s.weights[row + r] = s.weights[row + r] * factors[r] + weights[r];
}
