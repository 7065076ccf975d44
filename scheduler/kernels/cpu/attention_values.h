// P V: a tile's sums take in the values of a block, packed or from where they lie. Included by attention.cpp for each
// instruction set.

// sums = sums * factor + weight * values, for a line of which only one half is seen.
template <class E, bool LOW>
static void add_half(const float* weight, const float* values, float factor, float* sums, int64_t columns) {
    const F value = set1_word(weight);
    for (int64_t c = 0; c < columns; c += LANES) {
        const F words = load(values + c), half = LOW ? keep_low(words) : keep_high(words);
        store(sums + c, dot(mul(load(sums + c), set1(factor)), value, half, E()));
    }
}

// The rest of a row's values: lines [line, end / pair) and, if the last line is only half seen, that half. The sums so far
// are multiplied by `factor`, if there is anything.
template <class E>
static void add_rest(const Scratch<E>& s, int64_t row, const float* probabilities, int64_t line, int64_t end, float factor) {
    const int64_t whole = end / s.PAIR;
    float* sums = s.sums + row * s.columns;
    if (line < whole) {
        multiply<E, 1>(probabilities + line, 0, s.values + line * s.columns, s.columns, whole - line, &factor, sums, 0,
                       s.columns);
        factor = 1.0f;
    }
    if (end % s.PAIR)
        add_half<E, true>(probabilities + whole, s.values + whole * s.columns, factor, sums, s.columns);
}

// All of a row's values in a block, of which it does not see the first.
template <class E>
static void add_cut(const Scratch<E>& s, int64_t row, const float* probabilities, Seen seen, float factor) {
    int64_t line = seen.first / s.PAIR;
    if (seen.first % s.PAIR) {
        add_half<E, false>(probabilities + line, s.values + line * s.columns, factor, s.sums + row * s.columns, s.columns);
        factor = 1.0f;
        line++;
    }
    add_rest(s, row, probabilities, line, seen.end, factor);
}

// 2 * LANES columns of a line: of a position, or of it and the next one.
template <class E>
CAESURA_INLINE void value_lines(const E* value, int64_t, F& low, F& high) {
    low = load(value), high = load(value + LANES);
}
CAESURA_INLINE void value_lines(const bf16* value, int64_t next, F& low, F& high) {
    interleave(value, value + next, low, high);
}
CAESURA_INLINE void value_lines(const bf16* value, int64_t next, Halves& low, Halves& high) {
    low = {load(value), load(value + next)}, high = {load(value + LANES), load(value + next + LANES)};
}

// A line's part of the positions that are seen.
enum Kept : int { ALL, LOWER, UPPER };
template <int KEPT>
CAESURA_INLINE F kept(F line) {
    return KEPT == LOWER ? keep_low(line) : KEPT == UPPER ? keep_high(line) : line;
}
template <int KEPT>
CAESURA_INLINE Halves kept(Halves line) {
    return {KEPT == UPPER ? zero() : line.low, KEPT == LOWER ? zero() : line.high};
}

// C vectors of columns of R rows take in a line; meanwhile as much is fetched from `ahead` on.
template <class E, int KEPT, int R, int C>
CAESURA_INLINE void add_line(F (&sum)[R][C], const float* weights, const E* value, int64_t value_row, const char* ahead) {
    constexpr int FETCHED = 64 / (LANES * sizeof(Word<E>));  // vectors of values for each line that is fetched
    constexpr int LINES = R <= 2 ? 2 : C;  // at a time: what fits the registers beside the sums
#pragma GCC unroll 8
    for (int c = 0; c < C; c += LINES) {
        Ready<E> line[LINES];
        for (int i = 0; i < LINES; i += 2) value_lines(value + (c + i) * LANES, value_row, line[i], line[i + 1]);
        for (int i = 0; i < LINES; i++) {
            line[i] = kept<KEPT>(line[i]);
            if ((c + i) % FETCHED == 0) prefetch(ahead + (c + i) * LANES * sizeof(Word<E>), 64);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const Ready<E> weight = ready(set1_word(weights + r * (BLOCK / Scratch<Computed<E>>::PAIR)), Computed<E>());
            for (int i = 0; i < LINES; i++) sum[r][c + i] = dot(sum[r][c + i], weight, line[i], Computed<E>());
        }
    }
}

// C vectors of columns of R rows take in the block's values from where they lie; meanwhile the same part of `later_keys` is
// fetched. All rows see the block from `first` on.
template <class E, int R, int C>
static void add_values(const ScratchOf<E>& s, const Block<E>& block, int64_t value_row, int64_t first, const float* factors,
                       int64_t row, int64_t column) {
    F sum[R][C];
    float* sums = s.sums + row * s.columns + column;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = mul(load(sums + r * s.columns + c * LANES), set1(factors[r]));
    const float* weights = s.probabilities + first / s.PAIR;
    for (int64_t page = first / PAGE; page * PAGE < block.count; page++) {
        const int64_t count = smaller(PAGE, block.count - page * PAGE), seen = first - page * PAGE;
        int64_t i = seen > 0 ? seen / s.PAIR * s.PAIR : 0;
        const E* value = block.values[page] + column;
        const char* ahead = (const char*)(block.later_keys[page] + column * PAGE);
        if constexpr (s.PAIR == 2)
            if (i < seen) {
                add_line<E, UPPER>(sum, weights++, value + i * value_row, value_row, ahead);
                i += s.PAIR;
            }
        for (; i + s.PAIR <= count; i += s.PAIR, ahead += C * LANES * sizeof(Word<E>))
            add_line<E, ALL>(sum, weights++, value + i * value_row, value_row, ahead);
        if constexpr (s.PAIR == 2)
            if (i < count) add_line<E, LOWER>(sum, weights++, value + i * value_row, value_row, ahead);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * s.columns + c * LANES, sum[r][c]);
}

// The same for the columns from `column` on.
template <class E, int R, int C>
static void add_all_values(const Attention& a, const ScratchOf<E>& s, const Block<E>& block, int64_t first,
                           const float* factors, int64_t row, int64_t column) {
    for (; column + C * LANES <= a.value_size; column += C * LANES)
        add_values<E, R, C>(s, block, a.value_row, first, factors, row, column);
    if constexpr (C > 2)
        if (column < a.value_size) add_all_values<E, R, C / 2>(a, s, block, first, factors, row, column);
}
