// Products with int8 weights: whole numbers of 16 bits times such of 8. Included by linear.cpp for each instruction set.
//
// A value of the weight is a multiple of the scale of its output and block of 128 inputs. A row of x becomes multiples of its
// own scale, at most 32,767 of them. Sums over a block are exact: 128 * 127 * 32,767 < 2^31. An element of y is one chain over
// the blocks in ascending order, sum += float(block) * scale, each operation rounded, then times the row's scale, plus the bias.
//
// Bytes of a word become two words of 16-bit numbers by shifts, (0, 2) and (1, 3): narrow rows of x lie in that order. So x has
// the accuracy of 16 bits at the price of 8: without VNNI, products of bytes need a sign and a second instruction for each pair.

constexpr int64_t INT8_BLOCK = INT8_COLUMNS / 4;  // words of the weight
constexpr int INT8_FEW = 4;

// What numbers of a row of x are multiplied by to become whole; writes the row's scale, NaN where one is not finite.
template <class E>
CAESURA_INLINE float narrow_factor(const E* x, int64_t size, char* to) {
    constexpr float MOST = 32767.0f, TINY = 1e-30f;  // smaller rows are zero
    F largest = zero(), wrong = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        const F value = size - i >= LANES ? load(x + i) : load(x + i, size - i);
        largest = max(largest, max(value, sub(zero(), value)));
        wrong = fma(value, zero(), wrong);
    }
    const float most = reduce_max(largest);
    const float scale = most * (1.0f / MOST) + reduce_add(wrong);
    std::memcpy(to, &scale, sizeof scale);
    return most < TINY ? 0.0f : MOST / most;
}

// A row of x: its scale, and behind the first line its numbers.
template <class E>
static void narrow_row(const E* x, int64_t size, char* to) {
    const float factor = narrow_factor(x, size, to);
    to += NARROW_HEAD;
    constexpr uint64_t LOW = 0x0000ffff0000ffff;
    alignas(64) uint64_t bits[LANES / 2];
    for (int64_t i = 0; i < size; i += LANES) {
        const F value = size - i >= LANES ? load(x + i) : load(x + i, size - i);
        store((float*)bits, add(mul(value, set1(factor)), set1(0x1.8p23f)));  // to the nearest whole number, the lowest bits
        for (int64_t k = 0; k < smaller(LANES, size - i) / 4; k++, to += 8) {
            const uint64_t four = (bits[2 * k] & LOW) | (bits[2 * k + 1] & LOW) << 16;
            std::memcpy(to, &four, sizeof four);
        }
    }
}

CAESURA_INLINE const char* narrow_start(const Linear& a, int64_t row) {
    return (const char*)a.narrow + row * narrow_row_bytes(a.words);
}

template <class E>
CAESURA_INLINE void store_scaled(const Linear& a, int64_t row, int64_t output, F sum) {
    float scale;
    std::memcpy(&scale, narrow_start(a, row), sizeof scale);
    store_outputs<E>(a, row, output, mul(sum, set1(scale)));
}

CAESURA_INLINE F add_block(F total, Ints sum, const float* scales) {
    return add(total, mul(to_floats(sum), load(scales)));
}

// Where the tile of a word begins, for outputs from this one on.
CAESURA_INLINE const float* tile_start(const Linear& a, int64_t panel, int64_t output, int64_t word) {
    return panel_start(a, panel) + output / 16 * HALF + output % 16 + word / TILE * 2 * HALF;
}
CAESURA_INLINE void split_word(const float* from, F (&words)[2][2]) {
    for (int i = 0; i < 2; i++) split_bytes(load_words(from + i * NEXT), words[i]);
}

// Rows [row, row + R), by the few: the weight is split in registers.
template <class E, int R>
static void meet_int8(const Linear& a, int64_t panel, int64_t row) {
    constexpr int VECTORS = PANEL / LANES;
    const int64_t stride = narrow_row_bytes(a.words);
    const char* x = narrow_start(a, row) + NARROW_HEAD;
    const float* scales = a.scales + panel * PANEL;
    F total[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (F& each : total[r]) each = zero();
    for (int64_t word = 0; word < a.words; scales += round_up(a.outputs, PANEL)) {
        Ints sum[R][VECTORS] = {};
        for (const int64_t end = smaller(word + INT8_BLOCK, a.words); word < end; word += TILE, x += 8 * TILE) {
            const int64_t count = smaller(TILE, end - word);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v += 2) {
                const float* from = tile_start(a, panel, v * LANES, word);
                for (int64_t i = 0; i < count; i++, from += 16) {
                    F words[2][2];
                    split_word(from, words);
                    fetch_second(from + AHEAD);
                    if (NEXT == HALF) fetch_second(from + AHEAD + HALF);
                    for (int step = 0; step < 2; step++)
                        for (int r = 0; r < R; r++) {
                            const F value = set1_word(x + r * stride + i * 8 + step * 4);
                            sum[r][v] = dot(sum[r][v], value, words[0][step]);
                            sum[r][v + 1] = dot(sum[r][v + 1], value, words[1][step]);
                        }
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] = add_block(total[r][v], sum[r][v], scales + v * LANES);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store_scaled<E>(a, row + r, panel * PANEL + v * LANES, total[r][v]);
}

template <class E, int R = INT8_FEW>
static void meet_int8_of(int rows, const Linear& a, int64_t panel, int64_t row) {
    if (rows == R) return meet_int8<E, R>(a, panel, row);
    if constexpr (R > 1) meet_int8_of<E, R - 1>(rows, a, panel, row);
}

// sums[R, PANEL] += a block of R rows: `words` of x times lines[words, PANEL]. Lines of `later` are asked for meanwhile.
template <int R>
static void add_int8(const char* x, int64_t stride, int64_t words, const float* lines, const float* scales, float* sums,
                     const float* later) {
    for (int64_t column = 0; column < PANEL; column += 2 * LANES, lines += 2 * LANES, scales += 2 * LANES, sums += 2 * LANES) {
        Ints sum[R][2] = {};
        for (int64_t i = 0; i < words; i++) {
            const F left = load_words(lines + i * PANEL), right = load_words(lines + i * PANEL + LANES);
            if (column == 0) fetch_second(later + i * 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const F value = set1_word(x + r * stride + i * 4);
                sum[r][0] = dot(sum[r][0], value, left);
                sum[r][1] = dot(sum[r][1], value, right);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) {
                float* total = sums + r * PANEL + i * LANES;
                store(total, add_block(load(total), sum[r][i], scales + i * LANES));
            }
    }
}

template <int R = ROWS<float>>
static void add_int8_of(int rows, const char* x, int64_t stride, int64_t words, const float* lines, const float* scales, float* sums,
                        const float* later) {
    if (rows == R) return add_int8<R>(x, stride, words, lines, scales, sums, later);
    if constexpr (R > 1) add_int8_of<R - 1>(rows, x, stride, words, lines, scales, sums, later);
}

// Up to two blocks of few rows go through a panel twice: it is in the second-level cache then. More rows share what a block of a
// panel becomes, in the first-level cache.
template <class E>
static void int8_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    if (end - row <= 2 * INT8_FEW) {
        const int64_t half = (end - row) / 2;
        if (end - row <= INT8_FEW) return meet_int8_of<E>((int)(end - row), a, panel, row);
        meet_int8_of<E>((int)half, a, panel, row);
        return meet_int8_of<E>((int)(end - row - half), a, panel, row + half);
    }
    const int64_t stride = narrow_row_bytes(a.words), scales_row = round_up(a.outputs, PANEL);
    alignas(64) float lines[2 * INT8_BLOCK * PANEL], sums[UNPACKED_ROWS * PANEL];
    for (; row < end; row += UNPACKED_ROWS) {
        const int64_t rows = smaller(UNPACKED_ROWS, end - row), blocks = (rows + ROWS<float> - 1) / ROWS<float>;
        std::memset(sums, 0, rows * PANEL * sizeof(float));
        const float* scales = a.scales + panel * PANEL;
        for (int64_t word = 0; word < a.words; word += INT8_BLOCK, scales += scales_row) {
            const int64_t count = smaller(INT8_BLOCK, a.words - word);
            for (int64_t tile = 0; tile < count; tile += TILE)
                for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
                    const float* from = tile_start(a, panel, output, word + tile);
                    float* to = lines + 2 * tile * PANEL + output;
                    for (const float* end = from + smaller(TILE, count - tile) * 16; from < end; from += 16) {
                        F words[2][2];
                        split_word(from, words);
                        for (int step = 0; step < 2; step++, to += PANEL)
                            store(to, words[0][step]), store(to + LANES, words[1][step]);
                    }
                }
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
                const char* x = narrow_start(a, row + first) + NARROW_HEAD + word * 8;
                const float* later = b == 0 ? tile_start(a, panel, 0, word) + AHEAD : lines;
                add_int8_of((int)(last - first), x, stride, 2 * count, lines, scales, sums + first * PANEL, later);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t output = 0; output < PANEL; output += LANES)
                store_scaled<E>(a, row + r, panel * PANEL + output, load(sums + r * PANEL + output));
    }
}
