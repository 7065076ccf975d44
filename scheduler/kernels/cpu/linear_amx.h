// The products of linear.cpp on AMX: sums of 16 rows x 16 outputs in tile registers. Included by linear.cpp, for bfloat16 and for
// int8 weights.
//
//     tiles 4, 5: 16 rows of x, 16 words each     tile 0 = 4 * 6   tile 1 = 4 * 7
//     tiles 6, 7: half a tile of the weight       tile 2 = 5 * 6   tile 3 = 5 * 7
//
// A tile instruction adds the words of a row one after the other, so the order of additions is that of linear.cpp; the
// bits need not be those of AVX-512. Every product goes this way, also that of a single row: missing rows are zeros.
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace amx {

struct alignas(64) Config {  // all eight tiles: 16 rows of 64 bytes
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Where a tile of x is to be loaded from: itself, or, where rows or words are missing, a copy filled up with zeros.
struct Source {
    const void* data;
    int64_t stride;
};

CAESURA_INLINE Source source(const char* x, int64_t stride, int64_t rows, int64_t words, char (&copy)[16][64]) {
    if (rows >= 16 && words == TILE) return {x, stride};
    for (int64_t r = 0; r < 16; r++) {
        const __mmask16 present = r < rows ? (__mmask16)((1u << words) - 1) : 0;
        _mm512_store_si512(copy[r], _mm512_maskz_loadu_epi32(present, x + (r < rows ? r : 0) * stride));
    }
    return {copy, 64};
}

// The sums of one block, at most 32 rows: 16 x 16 each, left and right half of the first 16 rows, then of the others.
static void sum_block(const Linear& a, int64_t row, int64_t rows, const float* w, float (&sums)[4][256]) {
    alignas(64) char copies[2][16][64];
    const bool two = rows > 16;
    const char* x = (const char*)a.x + row * a.x_stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t word = 0; word < a.words; word += TILE, w += 2 * HALF, x += 4 * TILE) {
        const int64_t words = smaller(TILE, a.words - word);
        for (int line = 0; line < 2 * TILE; line++) _mm_prefetch((const char*)(w + AHEAD + line * 16), _MM_HINT_T0);
        const Source first = source(x, a.x_stride, rows, words, copies[0]);
        _tile_loadd(4, first.data, first.stride);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + HALF, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!two) continue;
        const Source second = source(x + 16 * a.x_stride, a.x_stride, rows - 16, words, copies[1]);
        _tile_loadd(5, second.data, second.stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// Rows [row, end) of one panel.
static void panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    const Config config;
    alignas(64) float sums[4][256];
    _tile_loadconfig(&config);
    for (; row < end; row += 32) {
        const int64_t rows = smaller(32, end - row);
        sum_block(a, row, rows, panel_start(a, panel), sums);
        for (int64_t r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                avx512bf16::store_outputs<bf16>(a, row + r, panel * PANEL + half * 16,
                                                avx512bf16::load(&sums[r / 16 * 2 + half][r % 16 * 16]));
    }
    _tile_release();
}

// int8 weights (linear_int8.h). A number of x is 256 times a signed byte plus an unsigned one, and so is a sum: both are exact.
//
//     tile 4: 64 of the signed bytes of 16 rows    tile 0 = 4 * 6   tile 1 = 4 * 7
//     tile 5: the unsigned ones                    tile 2 = 5 * 6   tile 3 = 5 * 7
//
// Tiles reach vector registers through memory, and a tile that is stored holds up what comes after it: while the tiles of one
// block multiply, the sums of the block before are scaled and added.

// Behind the line of a narrow row's scale lie its signed bytes, then the others: planes of whole lines.
CAESURA_INLINE int64_t plane_bytes(int64_t words) { return round_up(words * 4, 64); }

template <class E>
static void narrow_row(const E* x, int64_t size, char* to) {
    using namespace avx512bf16;
    const F factor = set1(narrow_factor(x, size, to));
    const int64_t plane = plane_bytes(size / 4);
    to += NARROW_HEAD;
    for (int64_t i = 0; i < size; i += LANES) {
        const F value = size - i >= LANES ? load(x + i) : load(x + i, size - i);
        const __m512i number = _mm512_cvtps_epi32(mul(value, factor));
        _mm_storeu_si128((__m128i*)(to + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(number, 8)));
        _mm_storeu_si128((__m128i*)(to + plane + i), _mm512_cvtepi32_epi8(number));
    }
}

constexpr int64_t PASS = 4;  // groups of 16 rows that go through a panel together
constexpr int64_t BLOCK_WORDS = INT8_COLUMNS / 4, PARTS = 4;

// Sums of a block, as the tiles left them: totals[rows, PANEL] += (256 * sums[0, 1] + sums[2, 3]) * scales. Lines of `later` are
// asked for meanwhile, a few at a time: more of them would hold up those of x.
struct BlockSums {
    const int32_t (*sums)[256];
    const float* scales;
    float* totals;
    int64_t rows;
    const float* later;
    int64_t lines;  // for each part
};

CAESURA_INLINE void add_part(const BlockSums& a, int64_t part) {
    using namespace avx512bf16;
    for (int64_t i = part * a.lines; i < (part + 1) * a.lines; i++) fetch_second(a.later + i * 16);
    const int64_t end = a.rows * (part + 1) / PARTS;
    for (int64_t r = a.rows * part / PARTS; r < end; r++)
        for (int half = 0; half < 2; half++) {
            const Ints high = *(const Ints*)(a.sums[half] + r * 16), low = *(const Ints*)(a.sums[2 + half] + r * 16);
            float* total = a.totals + r * PANEL + half * 16;
            store(total, add_block(load(total), (high << 8) + low, a.scales + half * 16));
        }
}

CAESURA_INLINE void multiply_tile(const char* x, int64_t stride, int64_t plane, const float* w, const BlockSums& before, int64_t part) {
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + HALF, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    add_part(before, part);
    _tile_loadd(5, x + plane, stride);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
    add_part(before, part + 1);
}

// Of the rows at `x` and one block of a panel, a tile or two.
CAESURA_INLINE void multiply_block(const char* x, int64_t stride, int64_t plane, const float* w, int64_t tiles, const BlockSums& before,
                                   int32_t (&sums)[4][256]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiply_tile(x, stride, plane, w, before, 0);
    if (tiles == 2) {
        multiply_tile(x + 64, stride, plane, w + 2 * HALF, before, 2);
    } else {
        add_part(before, 2), add_part(before, 3);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// Rows [row, end) of one panel, 16 at a time; the last 16 may begin within those before them.
template <class E>
static void int8_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    const int64_t rows = smaller(16, end - row), groups = (end - row + 15) / 16, passes = (groups + PASS - 1) / PASS;
    const int64_t stride = narrow_row_bytes(a.words), plane = plane_bytes(a.words), scales_row = round_up(a.outputs, PANEL);
    const int64_t lines = (2 * BLOCK_WORDS / PARTS + groups - 1) / groups;
    alignas(64) int32_t sums[4][256];
    alignas(64) float totals[PASS][16 * PANEL];
    const auto first_row = [&](int64_t group) { return smaller(row + group * 16, end - rows); };
    Config config;
    for (int tile = 0; tile < 6; tile++) config.rows[tile] = (uint8_t)rows;
    _tile_loadconfig(&config);
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t first = groups * pass / passes, last = groups * (pass + 1) / passes;
        std::memset(totals, 0, (last - first) * sizeof totals[0]);
        const float* scales = a.scales + panel * PANEL;
        BlockSums before = {sums, scales, totals[0], 0, nullptr, 0};
        for (int64_t word = 0; word < a.words; word += BLOCK_WORDS, scales += scales_row) {
            const float *w = panel_start(a, panel) + word * PANEL, *later = panel_start(a, panel + 1) + word * PANEL;
            for (int64_t group = first; group < last; group++) {
                const char* x = avx512bf16::narrow_start(a, first_row(group)) + NARROW_HEAD + word * 4;
                multiply_block(x, stride, plane, w, a.words - word > TILE ? 2 : 1, before, sums);
                before = {sums, scales, totals[group - first], rows, later + group * PARTS * lines * 16, lines};
            }
        }
        for (int64_t part = 0; part < PARTS; part++) add_part(before, part);
        for (int64_t group = first; group < last; group++)
            for (int64_t r = 0; r < rows; r++)
                for (int half = 0; half < 2; half++)
                    avx512bf16::store_scaled<E>(a, first_row(group) + r, panel * PANEL + half * 16,
                                                avx512bf16::load(totals[group - first] + r * PANEL + half * 16));
    }
    _tile_release();
}

}  // namespace amx
#pragma GCC pop_options
