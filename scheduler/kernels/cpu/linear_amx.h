// The products of linear.cpp on AMX: sums of 16 rows x 16 outputs in tile registers. Included by linear.cpp, for bfloat16 and for
// int8 weights.
//
//     tiles 4, 5: 16 rows of x, 16 words each     tile 0 = 4 * 6   tile 1 = 4 * 7
//     tiles 6, 7: half a tile of the weight       tile 2 = 5 * 6   tile 3 = 5 * 7
//
// A tile instruction adds the words of a row one after the other, so the order of additions is that of linear.cpp; the
// bits need not be those of AVX-512. Every product goes this way, also that of a single row: tiles have as many rows as there are,
// which load and multiply faster than sixteen.
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace amx {

// Memory that a tile of x is loaded from: x itself, or a copy filled up with zeros where words are missing.
struct Source {
    const void* data;
    int64_t stride;
};

CAESURA_INLINE Source source(const char* x, int64_t stride, int64_t rows, int64_t words, char (&copy)[16][64]) {
    if (words == TILE) return {x, stride};
    const __mmask16 present = (__mmask16)((1u << words) - 1);
    for (int64_t r = 0; r < smaller(16, rows); r++)
        _mm512_store_si512(copy[r], _mm512_maskz_loadu_epi32(present, x + r * stride));
    return {copy, 64};
}

// Tiles reach vector registers through memory, and a tile that is stored holds up what comes after it: sums become outputs when
// the tiles of the next block have been multiplied.

// At most 32 rows times two halves of tiles of the weight: outputs [output, output + 16), and what lies 16, or with a gate
// gate->size, behind them.
struct Block {
    Linear a;
    int64_t row, rows, output;
    const float (*sums)[256];  // 16 x 16: left and right half of the first 16 rows, then of the others
};

// put(row, left sums, right sums)
template <class Put>
CAESURA_INLINE void each_row(const Block& b, const Put& put) {
    for (int64_t r = 0; r < b.rows; r++) {
        const float* sums = &b.sums[r / 16 * 2][r % 16 * 16];
        put(b.row + r, avx512bf16::load(sums), avx512bf16::load(sums + 256));
    }
}

template <int BEND>
CAESURA_INLINE void store_gated(const Block& b) {
    using namespace avx512bf16;
    const Gate& gate = *b.a.gate;
    const bf16* bias = b.a.bias ? (const bf16*)b.a.bias + b.output : nullptr;
    each_row(b, [&](int64_t row, F left, F right) __attribute__((always_inline)) {
        if (bias) left = add(left, load(bias)), right = add(right, load(bias + gate.size));
        store((bf16*)gate.out + row * gate.out_row + b.output, gated<BEND>(rounded(left, bf16()), rounded(right, bf16()), bf16()));
    });
}

static void store_block(const Block& b) {
    using namespace avx512bf16;
    const Linear& a = b.a;
    if (a.gate) {
        switch (a.gate->bend) {
            case SILU: return store_gated<SILU>(b);
            case GELU_TANH: return store_gated<GELU_TANH>(b);
            default: return store_gated<CLAMPED>(b);
        }
    }
    if (a.wide || a.outputs - b.output < PANEL) {
        return each_row(b, [&](int64_t row, F left, F right) __attribute__((always_inline)) {
            store_outputs<bf16>(a, row, b.output, left);
            store_outputs<bf16>(a, row, b.output + 16, right);
        });
    }
    const bf16* bias = a.bias ? (const bf16*)a.bias + b.output : nullptr;
    each_row(b, [&](int64_t row, F left, F right) __attribute__((always_inline)) {
        if (bias) left = add(left, load(bias)), right = add(right, load(bias + 16));
        _mm512_storeu_si512((bf16*)a.y + row * a.y_stride + b.output, (__m512i)_mm512_cvtne2ps_pbh(right, left));
    });
}

class Products {
   public:
    Products() { before.rows = 0; }

    // Rows [row, end) and one panel, or one of the gate and that of what it multiplies. finish() ends the last of them.
    void add(const Linear& a, int64_t panel, int64_t row, int64_t end) {
        const int64_t blocks = (end - row + 31) / 32, both = a.gate ? 2 : 1;
        for (int half = 0; half < both; half++) {
            const float* left = panel_start(a, panel) + half * HALF;
            const float* right = a.gate ? panel_start(a, panel + a.gate->size / PANEL) + half * HALF : left + HALF;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t from = row + b * 32;
                const Block block = {a, from, smaller(32, end - from), panel * PANEL + half * 16, sums[turn]};
                multiply(block, left, right, b, blocks);
                before = block;
                turn ^= 1;
            }
        }
    }

    void finish() {
        if (before.rows) store_block(before);
        before.rows = 0;
    }

   private:
    // The first of the blocks asks for lines of these halves ahead of their use, the others for those of the next panel.
    void multiply(const Block& block, const float* left, const float* right, int64_t number, int64_t blocks) {
        const Linear& a = block.a;
        const int64_t ahead = number ? PANEL * round_up(a.words, TILE) : AHEAD;
        const int64_t first_line = number ? TILE * (number - 1) / (blocks - 1) : 0, end_line = number ? TILE * number / (blocks - 1) : TILE;
        alignas(64) char copies[2][16][64];
        const bool two = block.rows > 16;
        tiles.use(block.rows, [&](TileConfig& config) {
            config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)smaller(16, block.rows);
            if (two) config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)(block.rows - 16);
        });
        const char* x = (const char*)a.x + block.row * a.x_stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t word = 0; word < a.words; word += TILE, left += 2 * HALF, right += 2 * HALF, x += 4 * TILE) {
            const int64_t words = smaller(TILE, a.words - word);
            for (int64_t line = first_line; line < end_line; line++) fetch_second(left + ahead + line * 16), fetch_second(right + ahead + line * 16);
            const Source upper = source(x, a.x_stride, block.rows, words, copies[0]);
            _tile_loadd(4, upper.data, upper.stride);
            _tile_loadd(6, left, 64);
            _tile_loadd(7, right, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                const Source lower = source(x + 16 * a.x_stride, a.x_stride, block.rows - 16, words, copies[1]);
                _tile_loadd(5, lower.data, lower.stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        finish();
        _tile_stored(0, sums[turn][0], 64);
        _tile_stored(1, sums[turn][1], 64);
        if (!two) return;
        _tile_stored(2, sums[turn][2], 64);
        _tile_stored(3, sums[turn][3], 64);
    }

    Tiles tiles;
    alignas(64) float sums[2][4][256];
    int turn = 0;
    Block before;
};

// int8 weights (linear_int8.h). Tile 4: 64 numbers of 16 rows; tile 0 = 4 * 6, tile 1 = 4 * 7.
// The sums of the block before are scaled and added here.

constexpr int64_t PASS = 4;  // groups of 16 rows that go through a panel together
constexpr int64_t PARTS = 2;

// Sums of a block, as the tiles left them: totals[rows, PANEL] += sums * scales of x * those of the weight. Lines of `later`
// are asked for meanwhile, a few at a time: more of them would hold up those of x.
struct BlockSums {
    const int32_t (*sums)[256];
    const char* heads;  // of the rows of x
    const float* scales;
    float* totals;
    int64_t rows;
    const float* later;
    int64_t lines;  // for each part
};

CAESURA_INLINE void add_part(const BlockSums& a, int64_t stride, int64_t part) {
    using namespace avx512bf16;
    for (int64_t i = part * a.lines; i < (part + 1) * a.lines; i++) fetch_second(a.later + i * 16);
    const int64_t end = a.rows * (part + 1) / PARTS;
    for (int64_t r = a.rows * part / PARTS; r < end; r++) {
        float scale;
        std::memcpy(&scale, a.heads + r * stride, sizeof scale);
        for (int half = 0; half < 2; half++) {
            float* total = a.totals + r * PANEL + half * 16;
            const F sum = to_floats(*(const Ints*)(a.sums[half] + r * 16));
            store(total, add(load(total), mul(mul(sum, set1(scale)), load(a.scales + half * 16))));
        }
    }
}

// The rows at `x` times one block of a panel, a tile or two.
CAESURA_INLINE void multiply_block(const char* x, int64_t stride, const float* w, int64_t tiles, const BlockSums& before,
                                   int32_t (&sums)[2][256]) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t tile = 0; tile < PARTS; tile++, x += 64, w += 2 * HALF) {
        if (tile < tiles) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + HALF, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        }
        add_part(before, stride, tile);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
}

// Rows [row, end) of one panel, 16 at a time; the last 16 may begin within those before them.
template <class E>
static void int8_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    constexpr int64_t WORDS = avx512bf16::BLOCK_WORDS<int8>;
    const int64_t rows = smaller(16, end - row), groups = (end - row + 15) / 16, passes = (groups + PASS - 1) / PASS;
    const int64_t stride = narrow_row_bytes(a.words * 4), numbers = narrow_head(a.words * 4);
    const int64_t scales_row = round_up(a.outputs, PANEL);
    const int64_t lines = (2 * WORDS / PARTS + groups - 1) / groups;
    alignas(64) int32_t sums[2][256];
    alignas(64) float totals[PASS][16 * PANEL];
    const auto first_row = [&](int64_t group) { return smaller(row + group * 16, end - rows); };
    Tiles tiles;
    tiles.use(rows, [&](TileConfig& config) {
        for (int tile = 0; tile < 6; tile++) config.rows[tile] = (uint8_t)rows;
    });
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t first = groups * pass / passes, last = groups * (pass + 1) / passes;
        std::memset(totals, 0, (last - first) * sizeof totals[0]);
        const float* scales = a.scales + panel * PANEL;
        BlockSums before = {sums, nullptr, scales, totals[0], 0, nullptr, 0};
        for (int64_t word = 0; word < a.words; word += WORDS, scales += scales_row) {
            const float *w = panel_start(a, panel) + word * PANEL, *later = panel_start(a, panel + 1) + word * PANEL;
            for (int64_t group = first; group < last; group++) {
                const char* x = (const char*)a.narrow + first_row(group) * stride;
                multiply_block(x + numbers + word * 4, stride, w, a.words - word > TILE ? 2 : 1, before, sums);
                before = {sums, x + word / WORDS * sizeof(NarrowBlock), scales, totals[group - first], rows,
                          later + group * PARTS * lines * 16, lines};
            }
        }
        for (int64_t part = 0; part < PARTS; part++) add_part(before, stride, part);
        for (int64_t group = first; group < last; group++)
            for (int64_t r = 0; r < rows; r++)
                for (int half = 0; half < 2; half++)
                    avx512bf16::store_outputs<E>(a, first_row(group) + r, panel * PANEL + half * 16,
                                                 avx512bf16::load(totals[group - first] + r * PANEL + half * 16));
    }
}

}  // namespace amx
#pragma GCC pop_options
