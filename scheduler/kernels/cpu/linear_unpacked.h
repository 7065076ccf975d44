// Products with weights that are stored narrower than they are multiplied: fp8 with any x, and fp16. Included by linear.cpp for
// each instruction set.
//
// A word of the weight becomes words of what x is computed as. An fp8 value is multiplied by the scale of its block and rounded
// once to x's type, so the product is that of the dequantised weight, to the last bit. Few rows meet them in registers. More rows
// share them: a piece of a panel at a time lies unpacked in the first-level cache, and sums wait in memory between the pieces.
// Rows of fp16 are widened piece by piece, too.

constexpr int64_t PIECE = 2 * TILE;    // words of the weight
constexpr int64_t UNPACKED_ROWS = 48;  // whose sums wait

template <class W, class E>
constexpr int64_t STEPS = sizeof(Computed<E>) / sizeof(W);  // words of what x is computed as, to one of the weight

// Rows that are few: to widen fp16 costs less than to store and load what it becomes, as long as there are registers.
template <class W, class E>
constexpr int FEW = std::is_same_v<W, fp8> ? 4 : ROWS<E>;

template <int K>
CAESURA_INLINE F scaled_fp8(F line, F scale) {
    return mul(from_fp8<K>(line), scale);
}
CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[4], float) {
    words[0] = scaled_fp8<0>(line, scale), words[1] = scaled_fp8<1>(line, scale);
    words[2] = scaled_fp8<2>(line, scale), words[3] = scaled_fp8<3>(line, scale);
}
CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[4], fp16) {
    unpack_line(line, scale, words, float());
    for (F& each : words) each = rounded(each, fp16());
}
CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[2], bf16) {
    words[0] = pairs(scaled_fp8<0>(line, scale), scaled_fp8<1>(line, scale));
    words[1] = pairs(scaled_fp8<2>(line, scale), scaled_fp8<3>(line, scale));
}

// Two vectors of outputs of one panel, word by word from `word` on.
template <class W, class E>
struct Columns {
    static constexpr bool SCALED = std::is_same_v<W, fp8>;
    const float *tile, *scales = nullptr;  // the first of these outputs; their scales in the blocks to come
    int64_t scales_row = 0, block = 0, word, left = 0;  // left: of the block
    F scale[2];

    Columns(const Linear& a, int64_t panel, int64_t word, int64_t output)
        : tile(panel_start(a, panel) + output / 16 * HALF + output % 16), word(word) {
        if constexpr (SCALED) {
            scales_row = round_up(a.outputs, PANEL), block = a.scale_words, left = block - word % block;
            scales = a.scales + word / block * scales_row + panel * PANEL + output;
            next_scales();
        }
    }
    __attribute__((always_inline)) void next_scales() {
        scale[0] = load(scales), scale[1] = load(scales + LANES);
        scales += scales_row;
    }
    // Not beyond the last word.
    __attribute__((always_inline)) void next(F (&words)[2][STEPS<W, E>]) {
        if constexpr (SCALED) {
            if (left == 0) next_scales(), left = block;
            left--;
        }
        const float* from = tile + word / TILE * 2 * HALF + word % TILE * 16;
        word++;
        for (int i = 0; i < 2; i++, from += NEXT) {
            const F line = load_words(from);
            fetch_second(from + AHEAD);
            if constexpr (SCALED) {
                unpack_line(line, scale[i], words[i], E());
                if (__builtin_expect(has_nan(line), false))
                    for (F& each : words[i]) each = poisoned(each, line);
            } else {
                from_fp16(line, words[i][0], words[i][1]);
            }
        }
    }
};

// Rows of x as products take them.
struct Rows {
    const char* x;
    int64_t stride;  // bytes
};

template <class E>
constexpr bool WIDENED = !std::is_same_v<Computed<E>, E>;
template <class W>
constexpr int64_t PIECE_ELEMENTS = PIECE * 4 / sizeof(W);
template <class W, class E, int R>
constexpr int64_t WIDE_FLOATS = WIDENED<E> ? R * PIECE_ELEMENTS<W> : 1;

// R rows of `count` words of the weight from `word` on: where they lie, or at most a piece of them, widened.
template <class W, class E, int R>
CAESURA_INLINE Rows take_rows(const Linear& a, int64_t row, int64_t word, int64_t count, float* widened) {
    const Rows rows = {(const char*)a.x + row * a.x_stride + word * 4 / (int64_t)sizeof(W) * (int64_t)sizeof(E), a.x_stride};
    if constexpr (!WIDENED<E>) return rows;
    const int64_t elements = count * 4 / (int64_t)sizeof(W);
    for (int r = 0; r < R; r++) {
        const E* from = (const E*)(rows.x + r * rows.stride);
        float* to = widened + r * PIECE_ELEMENTS<W>;
        int64_t i = 0;
        for (; i + LANES <= elements; i += LANES) store(to + i, load(from + i));
        if (i < elements) store(to + i, load(from + i, elements - i));
    }
    return {(const char*)widened, PIECE_ELEMENTS<W> * 4};
}

// The sums of R rows take in the next `count` words of two vectors of outputs.
template <class W, class E, int R>
CAESURA_INLINE void meet_words(Columns<W, E>& columns, const Rows rows, int64_t count, F (&sum)[R][2]) {
    const char* x = rows.x;
    for (int64_t word = 0; word < count; word++) {
        F words[2][STEPS<W, E>];
        columns.next(words);
        for (int step = 0; step < STEPS<W, E>; step++, x += 4) {
            for (int r = 0; r < R; r++) {
                const F value = set1_word(x + r * rows.stride);
                sum[r][0] = dot(sum[r][0], value, words[0][step], Computed<E>());
                sum[r][1] = dot(sum[r][1], value, words[1][step], Computed<E>());
            }
        }
    }
}

// Rows [row, row + R), by the few.
template <class W, class E, int R>
static void meet_panel(const Linear& a, int64_t panel, int64_t row) {
    alignas(64) float widened[WIDE_FLOATS<W, E, R>];
    for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
        Columns<W, E> columns(a, panel, 0, output);
        F sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        if constexpr (WIDENED<E>) {
            for (int64_t word = 0; word < a.words; word += PIECE) {
                const int64_t count = smaller(PIECE, a.words - word);
                meet_words(columns, take_rows<W, E, R>(a, row, word, count, widened), count, sum);
            }
        } else {
            meet_words(columns, take_rows<W, E, R>(a, row, 0, a.words, widened), a.words, sum);
        }
        for (int r = 0; r < R; r++) {
            store_outputs<E>(a, row + r, panel * PANEL + output, sum[r][0]);
            store_outputs<E>(a, row + r, panel * PANEL + output + LANES, sum[r][1]);
        }
    }
}

template <class W, class E, int R = FEW<W, E>>
static void meet_panel_of(int rows, const Linear& a, int64_t panel, int64_t row) {
    if (rows == R) return meet_panel<W, E, R>(a, panel, row);
    if constexpr (R > 1) meet_panel_of<W, E, R - 1>(rows, a, panel, row);
}

// Words [word, word + count) of one panel, each as so many lines of PANEL outputs.
template <class W, class E>
static void unpack(const Linear& a, int64_t panel, int64_t word, int64_t count, float* lines) {
    for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
        Columns<W, E> columns(a, panel, word, output);
        float* to = lines + output;
        for (int64_t i = 0; i < count; i++) {
            F words[2][STEPS<W, E>];
            columns.next(words);
            for (int step = 0; step < STEPS<W, E>; step++, to += PANEL)
                store(to, words[0][step]), store(to + LANES, words[1][step]);
        }
    }
}

// sums[R, PANEL] += a piece of R rows of x, `count` words of the weight from `word` on, times lines[words, PANEL].
template <class W, class E, int R>
static void add_lines(const Linear& a, int64_t row, int64_t word, int64_t count, const float* lines, float* sums) {
    alignas(64) float widened[WIDE_FLOATS<W, E, R>];
    const Rows rows = take_rows<W, E, R>(a, row, word, count, widened);
    const int64_t words = count * STEPS<W, E>;
    for (int64_t column = 0; column < PANEL; column += 2 * LANES, lines += 2 * LANES, sums += 2 * LANES) {
        F sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = load(sums + r * PANEL), sum[r][1] = load(sums + r * PANEL + LANES);
        for (int64_t i = 0; i < words; i++) {
            const F left = load_words(lines + i * PANEL), right = load_words(lines + i * PANEL + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const F value = set1_word(rows.x + r * rows.stride + i * 4);
                sum[r][0] = dot(sum[r][0], value, left, Computed<E>());
                sum[r][1] = dot(sum[r][1], value, right, Computed<E>());
            }
        }
        for (int r = 0; r < R; r++) store(sums + r * PANEL, sum[r][0]), store(sums + r * PANEL + LANES, sum[r][1]);
    }
}

template <class W, class E, int R = ROWS<E>>
static void add_lines_of(int rows, const Linear& a, int64_t row, int64_t word, int64_t count, const float* lines, float* sums) {
    if (rows == R) return add_lines<W, E, R>(a, row, word, count, lines, sums);
    if constexpr (R > 1) add_lines_of<W, E, R - 1>(rows, a, row, word, count, lines, sums);
}

template <class W, class E>
static void unpacked_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    if (end - row <= FEW<W, E>) return meet_panel_of<W, E>((int)(end - row), a, panel, row);
    alignas(64) float lines[PIECE * STEPS<W, E> * PANEL], sums[UNPACKED_ROWS * PANEL];
    for (; row < end; row += UNPACKED_ROWS) {
        const int64_t rows = smaller(UNPACKED_ROWS, end - row), blocks = (rows + ROWS<E> - 1) / ROWS<E>;
        std::memset(sums, 0, rows * PANEL * sizeof(float));
        for (int64_t word = 0; word < a.words; word += PIECE) {
            const int64_t count = smaller(PIECE, a.words - word);
            unpack<W, E>(a, panel, word, count, lines);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
                add_lines_of<W, E>((int)(last - first), a, row + first, word, count, lines, sums + first * PANEL);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t output = 0; output < PANEL; output += LANES)
                store_outputs<E>(a, row + r, panel * PANEL + output, load(sums + r * PANEL + output));
    }
}
