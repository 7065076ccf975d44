// Products with floating-point weights: of x's type, or fp8. Included by linear.cpp for each instruction set.
//
// Where no instruction multiplies pairs of bf16, all types are multiplied as floats. Rows of x become floats once for all panels. A
// word of the weight becomes words of what x is computed as: in registers, where few rows meet them, or bf16, which takes two
// instructions. More rows share those of fp16 and fp8: a piece of a panel at a time lies unpacked in the first-level cache, and
// sums wait in memory between the pieces. So they do between parts of rows that are too long to be taken at once.
//
// An fp8 value is multiplied by the scale of its block and rounded once to x's type, so the product is that of the dequantised
// weight, to the last bit. Of two bf16 in a word the second is added first, as instructions for pairs do.

constexpr int64_t PIECE = 2 * TILE, DIRECT_PIECE = AHEAD / (2 * HALF) * TILE;  // words of the weight
// Rows of a chunk, at most. The more rows, the less often weights are read; floats take so long that fewer suffice.
template <class W>
constexpr int64_t MOST_ROWS = IS_NUMBER<W> ? 384 : 96;

// The type that products compute with.
template <class E>
using Factor = std::conditional_t<std::is_same_v<E, bf16> && PAIRS, bf16, float>;
template <class W, class E>
constexpr int64_t LEAST_ROWS = IS_NUMBER<W> || std::is_same_v<Factor<E>, bf16> ? CHUNK_ROWS : CHUNK_ROWS / 2;
template <class E>
constexpr bool SECOND_FIRST = std::is_same_v<E, bf16> && !PAIRS;

// Words of what x is computed as, to one of the weight.
template <class W, class E>
constexpr int64_t STEPS = IS_NUMBER<W> ? 1 : sizeof(Factor<E>) / sizeof(W);

// A block is R rows by two vectors of outputs: 2 R sums in registers, two or four of the weight, one of x.
template <class W, class E>
constexpr int BLOCK_ROWS = std::is_same_v<W, fp8> ? 4 : LANES == 16 ? 12 : std::is_same_v<W, bf16> && STEPS<W, E> == 2 ? 5 : 6;
// Rows that words of the weight meet in registers; 0: any number.
template <class W>
constexpr int64_t FEW = std::is_same_v<W, fp8> ? 4 : std::is_same_v<W, fp16> ? 12 : 0;

CAESURA_INLINE int64_t stride_of(int64_t words) { return (round_up(words, 16) / 16 | 1) * 16; }

// Takes values [value, value + values) of `rows` rows from `row` on, unless `inputs` are these. Rows do not begin in the same set of
// the first-level cache, where as many as it has ways would drive each other out.
template <class E>
static void take(const Linear& a, int64_t row, int64_t rows, int64_t value, int64_t values, Inputs& inputs) {
    const E* x = (const E*)((const char*)a.x + row * a.x_stride) + value;
    if (inputs.x == x && inputs.rows == rows && inputs.values == values) return;
    inputs.x = x, inputs.rows = rows, inputs.values = values;
    inputs.stride = stride_of(values * (int64_t)sizeof(Factor<E>) / 4);
    for (int64_t r = 0; r < rows; r++, x = (const E*)((const char*)x + a.x_stride)) {
        float* to = inputs.words + r * inputs.stride;
        if constexpr (std::is_same_v<E, Factor<E>>) {
            std::memcpy(to, x, values * sizeof(E));
        } else {
            const auto put = [&](int64_t i, F part) __attribute__((always_inline)) {
                store(to + i, SECOND_FIRST<E> ? swapped(part) : part);
            };
            int64_t i = 0;
            for (; i + LANES <= values; i += LANES) put(i, load(x + i));
            if (i < values) put(i, load(x + i, values - i));
        }
    }
}

template <int K>
CAESURA_INLINE F scaled_fp8(F line, F scale) {
    return mul(from_fp8<K>(line), scale);
}

// Unpacks a line as words of floats, or of pairs, in the order in which sums take them.
template <class W, class E, class To>
CAESURA_INLINE void unpack_line(F line, F scale, F (&words)[sizeof(To) / sizeof(W)]) {
    if constexpr (std::is_same_v<W, To>) {
        words[0] = line;
    } else if constexpr (std::is_same_v<W, bf16>) {
        const auto halves = ready(line, W());
        words[0] = halves.high, words[1] = halves.low;
    } else if constexpr (std::is_same_v<W, fp16>) {
        from_fp16(line, words[0], words[1]);
    } else {
        const F values[4] = {scaled_fp8<0>(line, scale), scaled_fp8<1>(line, scale), scaled_fp8<2>(line, scale),
                             scaled_fp8<3>(line, scale)};
        if constexpr (std::is_same_v<To, bf16>) {
            words[0] = pairs(values[0], values[1]), words[1] = pairs(values[2], values[3]);
        } else {
            for (int i = 0; i < 4; i++) words[i] = rounded(values[i ^ SECOND_FIRST<E>], E());
        }
        if (__builtin_expect(has_nan(line), false))
            for (F& each : words) each = poisoned(each, line);
    }
}

// The scales of two vectors of outputs, word by word.
template <class W>
struct BlockScales {
    F scale[2] = {zero(), zero()};

    BlockScales(const Linear&, const Part&, int64_t) {}
    __attribute__((always_inline)) void next() {}
};
template <>
struct BlockScales<fp8> {
    const float* scales;
    int64_t row, block, left;  // left: words of the block
    F scale[2];

    BlockScales(const Linear& a, const Part& part, int64_t output)
        : row(round_up(a.outputs, PANEL)), block(a.scale_words), left(block - part.word % block) {
        scales = part.scales + part.word / block * row + output;
        load_scales();
    }
    __attribute__((always_inline)) void load_scales() {
        scale[0] = load(scales), scale[1] = load(scales + LANES);
        scales += row;
    }
    __attribute__((always_inline)) void next() {
        if (left == 0) load_scales(), left = block;
        left--;
    }
};

// Calls `step` with 0 to N - 1 as constants: GCC then keeps what arrays hold in registers.
template <int N, class Step>
CAESURA_INLINE void unrolled(const Step& step) {
    if constexpr (N > 1) unrolled<N - 1>(step);
    step(std::integral_constant<int, N - 1>());
}

// sums[R, PANEL] += R rows of x (from `x` on) times a part of two vectors of outputs, from `output` on. With each word a line of
// `later` is asked for, or two of them.
template <class W, class E, int R>
static void block(const Linear& a, const Part& part, const float* x, int64_t stride, int64_t output, const float* later, bool two,
                  float* sums) {
    BlockScales<W> scales(a, part, output);
    const float* tile = part.tile + output / 16 * HALF + output % 16;
    Two sum[R];
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
        sum[r] = {load(sums + r * PANEL), load(sums + r * PANEL + LANES)};
    });
    for (int64_t begin = 0; begin < part.count; begin += TILE, tile += 2 * HALF) {
        const int64_t count = smaller(part.count - begin, TILE);
        for (int64_t i = 0; i < count; i++, x += STEPS<W, E>) {
            F left[STEPS<W, E>], right[STEPS<W, E>];
            scales.next();
            unpack_line<W, E, Factor<E>>(load_words(tile + i * 16), scales.scale[0], left);
            unpack_line<W, E, Factor<E>>(load_words(tile + i * 16 + offset_of(1)), scales.scale[1], right);
            fetch_second(later);
            later += 16;
            if (LANES == 16 && two) {
                fetch_second(later);
                later += 16;
            }
            unrolled<STEPS<W, E>>([&](auto step) __attribute__((always_inline)) {
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    sum[r] = dot(sum[r], x + r * stride + step, {left[step], right[step]}, Factor<E>());
                });
            });
        }
    }
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
        store(sums + r * PANEL, sum[r].first), store(sums + r * PANEL + LANES, sum[r].second);
    });
}

// Unpacks a part as one of x's type, or of floats.
template <class W, class E>
static Part unpack(const Linear& a, const Part& part, float* lines) {
    constexpr int64_t EACH = sizeof(Computed<E>) / sizeof(W);
    for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
        BlockScales<W> scales(a, part, output);
        const int64_t column = output / 16 * HALF + output % 16;
        for (int64_t i = 0; i < part.count; i++) {
            const float* from = part.tile + i / TILE * 2 * HALF + i % TILE * 16 + column;
            float* to = lines + i * EACH / TILE * 2 * HALF + i * EACH % TILE * 16 + column;
            scales.next();
            for (int v = 0; v < 2; v++) {
                F words[EACH];
                unpack_line<W, E, Computed<E>>(load_words(from + offset_of(v)), scales.scale[v], words);
                for (int64_t k = 0; k < EACH; k++) store(to + k * 16 + offset_of(v), words[k]);
            }
        }
    }
    return {lines, 0, part.count * EACH};
}
