// Products of words (a float, or two neighbouring bfloat16 values) whose lanes are columns, for both attentions. Included for each
// instruction set.
//
// Invariant: an output is one chain of sums over ascending words, for any number of rows and columns beside it.

// A tile's sums fill the registers: rows times vectors of columns.
template <class E>
constexpr int TILE_ROWS = LANES == 16 || sizeof(Computed<E>) == 4 ? 6 : 4;
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;

// out[R, C vectors] = out * factor + a[R, k] * b[k, C vectors], in words. FRESH: out is 0 before, and has no factors.
template <class E, int R, int C, bool FRESH>
static void multiply_tile(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t k, const float* factors,
                          float* out, int64_t out_row) {
    F sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            sum[r][c] = FRESH ? zero() : mul(load(out + r * out_row + c * LANES), set1(factors[r]));
    for (int64_t i = 0; i < k; i++, a++, b += b_row) {
        F line[C];
        for (int c = 0; c < C; c++) line[c] = load_words(b + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const F value = set1_word(a + r * a_row);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], value, line[c], E());
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * out_row + c * LANES, sum[r][c]);
}

// The same for any number of columns, which is a multiple of the lanes.
template <class E, int R, int C = TILE_VECTORS, bool FRESH = false>
static void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t k, const float* factors,
                     float* out, int64_t out_row, int64_t columns) {
    for (; columns >= C * LANES; columns -= C * LANES, b += C * LANES, out += C * LANES)
        multiply_tile<E, R, C, FRESH>(a, a_row, b, b_row, k, factors, out, out_row);
    if constexpr (C > 1)
        if (columns > 0) multiply<E, R, C - 1, FRESH>(a, a_row, b, b_row, k, factors, out, out_row, columns);
}
