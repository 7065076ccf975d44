// The product of linear.cpp on AMX: sums of 16 rows x 16 outputs in tile registers. Included by linear.cpp, for bfloat16 only.
//
//     tiles 4, 5: 16 rows of x, 16 words each     tile 0 = 4 * 6   tile 1 = 4 * 7
//     tiles 6, 7: half a tile of the weight       tile 2 = 5 * 6   tile 3 = 5 * 7
//
// A tile instruction adds the words of a row one after the other, so the order of additions is that of linear.cpp; the
// bits need not be those of AVX-512. Every product goes this way, also that of a single row: missing rows are zeros.
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
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

}  // namespace amx
#pragma GCC pop_options
