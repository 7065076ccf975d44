// Products with weights that are whole numbers of 8 or 4 bits: those of x have 8. Included by linear.cpp for each
// instruction set.
//
// A value of the weight is a multiple of the scale of its output and block of 128 inputs (of 32, where it has four bits). A
// value of x is a multiple of the scale of its row and block, from -127 to 127 times it. Sums over a block are exact:
// 128 * 127 * 128 < 2^24. An element of y is one chain over the blocks in ascending order, sum += float(block) * x's scale *
// the weight's, each operation rounded, plus the bias.
//
// A word of four bytes meets one of four numbers of x. A word of eight codes becomes two words of bytes by a table: the first
// four numbers lie in the lower halves of its bytes (kernels/linear.py).

template <class W>
constexpr int64_t BLOCK_WORDS = (std::is_same_v<W, int4> ? INT4_COLUMNS : INT8_COLUMNS) / VALUES<W>;

// A row of x as numbers, in blocks of so many columns. The scale is NaN where a value of its block is not finite.
template <class E>
static void narrow_row(const E* x, int64_t size, int64_t columns, char* to) {
    constexpr float MOST = 127.0f, TINY = 1e-30f;  // smaller blocks are zero
    char* numbers = to + narrow_head(size);
    const auto value_at = [&](int64_t i) __attribute__((always_inline)) {
        return size - i >= LANES ? load(x + i) : load(x + i, size - i);
    };
    for (int64_t begin = 0; begin < size; begin += columns, to += sizeof(NarrowBlock)) {
        const int64_t end = smaller(begin + columns, size);
        F largest = zero(), wrong = zero();
        for (int64_t i = begin; i < end; i += LANES) {
            const F value = value_at(i);
            largest = max(largest, max(value, sub(zero(), value)));
            wrong = fma(value, zero(), wrong);
        }
        const float most = reduce_max(largest);
        const F factor = set1(most < TINY ? 0.0f : MOST / most);
        for (int64_t i = begin; i < end; i += LANES) store_bytes(numbers + i, mul(value_at(i), factor));
        const float scale = most < TINY ? 0.0f : most * (1.0f / MOST);
        const NarrowBlock block = {scale + reduce_add(wrong), start_of(numbers + begin, (end - begin) / 4)};
        std::memcpy(to, &block, sizeof block);
    }
}

// sum[R] += a word of two vectors of outputs times a word of R rows of x.
template <int R>
CAESURA_INLINE void add_word(F left, F right, const char* x, int64_t stride, Ints (&sum)[R][2]) {
    const Bytes first = to_bytes(left), second = to_bytes(right);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const F value = set1_word(x + r * stride);
        sum[r][0] = dot(sum[r][0], value, first);
        sum[r][1] = dot(sum[r][1], value, second);
    }
}

// The counterpart of block() of linear_float.h, of rows the first of which begins at `narrow`. A part begins with a block.
template <class W, class E, int R>
static void number_block(const Linear& a, const Part& part, const float* narrow, int64_t stride, int64_t output,
                         const Later& later, float* sums) {
    const int64_t block = part.word / BLOCK_WORDS<W>, scales_row = round_up(a.outputs, PANEL);
    const char* head = (const char*)narrow + block * (int64_t)sizeof(NarrowBlock);
    const char* x = (const char*)narrow + narrow_head(a.words * VALUES<W>) + part.word * VALUES<W>;
    const float *tile = part.tile + offset_of(output / LANES), *scales = part.scales + block * scales_row + output;
    const float* lines = later.lines;
    stride *= sizeof(float);
    const F table = std::is_same_v<W, int4> ? load_table(a.numbers) : zero();
    F total[R][2];
    for (int r = 0; r < R; r++) total[r][0] = load(sums + r * PANEL), total[r][1] = load(sums + r * PANEL + LANES);
    for (int64_t word = 0; word < part.count; scales += scales_row, head += sizeof(NarrowBlock)) {
        NarrowBlock blocks[R];
        Ints sum[R][2];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            std::memcpy(&blocks[r], head + r * stride, sizeof blocks[r]);
            sum[r][0] = sum[r][1] = set1_ints(blocks[r].start);
        }
        const int64_t end = smaller(word + BLOCK_WORDS<W>, part.count);
        for (int64_t count; word < end; word += count) {
            count = smaller(TILE - word % TILE, end - word);
            const float* from = tile + word / TILE * 2 * HALF + word % TILE * 16;
            for (int64_t i = 0; i < count; i++, from += 16, x += VALUES<W>) {
                const F left = load_words(from), right = load_words(from + offset_of(1));
                fetch_second(lines);
                lines += 16;
                if (LANES == 16 && later.two) {  // tested in the loop: GCC's two loops instead read one row a sixth slower
                    fetch_second(lines);
                    lines += 16;
                }
                if constexpr (std::is_same_v<W, int4>) {
                    add_word<R>(from_codes<false>(left, table), from_codes<false>(right, table), x, stride, sum);
                    add_word<R>(from_codes<true>(left, table), from_codes<true>(right, table), x + 4, stride, sum);
                } else {
                    add_word<R>(left, right, x, stride, sum);
                }
            }
        }
        const F left = load(scales), right = load(scales + LANES);
        if (later.scales) {  // so far apart that the processor's own prefetchers find no track
            fetch_second(scales + PANEL);
            if (LANES == 16) fetch_second(scales + PANEL + LANES);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const F scale = set1(blocks[r].scale);
            total[r][0] = add(total[r][0], mul(mul(to_floats(sum[r][0]), scale), left));
            total[r][1] = add(total[r][1], mul(mul(to_floats(sum[r][1]), scale), right));
        }
    }
    for (int r = 0; r < R; r++) store(sums + r * PANEL, total[r][0]), store(sums + r * PANEL + LANES, total[r][1]);
}
