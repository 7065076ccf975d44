// Products with weights that are stored narrower than x: fp8. Included by linear.cpp for each instruction set.
//
// A word of the weight becomes words of x's type. Each value is multiplied by the scale of its block and rounded once, so the
// product is that of the dequantised weight, to the last bit. Few rows meet them in registers. More rows share them: a piece of a
// panel at a time lies unpacked in the first-level cache, and sums wait in memory between the pieces.

constexpr int FEW = 4;
constexpr int64_t PIECE = 2 * TILE;    // words of the weight
constexpr int64_t UNPACKED_ROWS = 48;  // whose sums wait

template <class W, class E>
constexpr int64_t STEPS = sizeof(E) / sizeof(W);  // words of x to one of the weight

CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[4], float) {
    words[0] = mul(from_fp8<0>(line), scale), words[1] = mul(from_fp8<1>(line), scale);
    words[2] = mul(from_fp8<2>(line), scale), words[3] = mul(from_fp8<3>(line), scale);
}
CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[2], bf16) {
    words[0] = pairs(mul(from_fp8<0>(line), scale), mul(from_fp8<1>(line), scale));
    words[1] = pairs(mul(from_fp8<2>(line), scale), mul(from_fp8<3>(line), scale));
}

// Two vectors of outputs of one panel, word by word from `word` on.
template <class W, class E>
struct Columns {
    const float *tile, *scales;  // the first of these outputs; their scales in the blocks to come
    const int64_t scales_row, block;
    int64_t word, left;  // of the block
    F scale[2];

    Columns(const Linear& a, int64_t panel, int64_t word, int64_t output)
        : tile(panel_start(a, panel) + output / 16 * HALF + output % 16), scales_row(round_up(a.outputs, PANEL)), block(a.scale_words),
          word(word), left(block - word % block) {
        scales = a.scales + word / block * scales_row + panel * PANEL + output;
        next_scales();
    }
    __attribute__((always_inline)) void next_scales() {
        scale[0] = load(scales), scale[1] = load(scales + LANES);
        scales += scales_row;
    }
    // Not beyond the last word.
    __attribute__((always_inline)) void next(F (&words)[2][STEPS<W, E>]) {
        if (left == 0) next_scales(), left = block;
        left--;
        const float* from = tile + word / TILE * 2 * HALF + word % TILE * 16;
        word++;
        for (int i = 0; i < 2; i++, from += NEXT) {
            const F line = load_words(from);
            _mm_prefetch((const char*)(from + AHEAD), _MM_HINT_T1);
            unpack_line(line, scale[i], words[i], E());
            if (__builtin_expect(has_nan(line), false))
                for (F& each : words[i]) each = poisoned(each, line);
        }
    }
};

// Rows [row, row + R), by the few.
template <class W, class E, int R>
static void meet_panel(const Linear& a, int64_t panel, int64_t row) {
    for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
        const char* x = (const char*)a.x + row * a.x_stride;
        Columns<W, E> columns(a, panel, 0, output);
        F sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
        for (int64_t word = 0; word < a.words; word++) {
            F words[2][STEPS<W, E>];
            columns.next(words);
            for (int step = 0; step < STEPS<W, E>; step++, x += 4) {
                for (int r = 0; r < R; r++) {
                    const F value = set1_word(x + r * a.x_stride);
                    sum[r][0] = dot(sum[r][0], value, words[0][step], E());
                    sum[r][1] = dot(sum[r][1], value, words[1][step], E());
                }
            }
        }
        for (int r = 0; r < R; r++) {
            store_outputs<E>(a, row + r, panel * PANEL + output, sum[r][0]);
            store_outputs<E>(a, row + r, panel * PANEL + output + LANES, sum[r][1]);
        }
    }
}

template <class W, class E, int R = FEW>
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

// sums[R, PANEL] += x[R, words] times lines[words, PANEL].
template <class E, int R>
static void add_lines(const char* x, int64_t x_stride, const float* lines, int64_t words, float* sums) {
    for (int64_t column = 0; column < PANEL; column += 2 * LANES, lines += 2 * LANES, sums += 2 * LANES) {
        F sum[R][2];
        for (int r = 0; r < R; r++) sum[r][0] = load(sums + r * PANEL), sum[r][1] = load(sums + r * PANEL + LANES);
        for (int64_t i = 0; i < words; i++) {
            const F left = load_words(lines + i * PANEL), right = load_words(lines + i * PANEL + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const F value = set1_word(x + r * x_stride + i * 4);
                sum[r][0] = dot(sum[r][0], value, left, E());
                sum[r][1] = dot(sum[r][1], value, right, E());
            }
        }
        for (int r = 0; r < R; r++) store(sums + r * PANEL, sum[r][0]), store(sums + r * PANEL + LANES, sum[r][1]);
    }
}

template <class E, int R>
static void add_lines_of(int rows, const char* x, int64_t x_stride, const float* lines, int64_t words, float* sums) {
    if (rows == R) return add_lines<E, R>(x, x_stride, lines, words, sums);
    if constexpr (R > 1) add_lines_of<E, R - 1>(rows, x, x_stride, lines, words, sums);
}

template <class W, class E>
static void unpacked_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    if (end - row <= FEW) return meet_panel_of<W, E>((int)(end - row), a, panel, row);
    alignas(64) float lines[PIECE * STEPS<W, E> * PANEL], sums[UNPACKED_ROWS * PANEL];
    for (; row < end; row += UNPACKED_ROWS) {
        const int64_t rows = smaller(UNPACKED_ROWS, end - row), blocks = (rows + ROWS<E> - 1) / ROWS<E>;
        std::memset(sums, 0, rows * PANEL * sizeof(float));
        for (int64_t word = 0; word < a.words; word += PIECE) {
            const int64_t count = smaller(PIECE, a.words - word);
            unpack<W, E>(a, panel, word, count, lines);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
                const char* x = (const char*)a.x + (row + first) * a.x_stride + word * STEPS<W, E> * 4;
                add_lines_of<E, ROWS<E>>((int)(last - first), x, a.x_stride, lines, count * STEPS<W, E>, sums + first * PANEL);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t output = 0; output < PANEL; output += LANES)
                store_outputs<E>(a, row + r, panel * PANEL + output, load(sums + r * PANEL + output));
    }
}
