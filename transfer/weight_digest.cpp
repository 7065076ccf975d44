// Lanes of weight_digest.py, which has the definition.
#include <cstdint>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define CAESURA_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int LANES = 4;
constexpr int64_t BLOCK = 4096;

uint64_t mixed(uint64_t state) {
    state *= 0x9E3779B97F4A7C15;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9;
    state = (state ^ state >> 27) * 0x94D049BB133111EB;
    return state ^ state >> 31;
}

struct Table {
    alignas(64) int16_t of[LANES][BLOCK];
    Table() {
        for (int64_t i = 0; i < LANES * BLOCK; ++i) of[i / BLOCK][i % BLOCK] = static_cast<int16_t>(mixed(i) | 1);
    }
};
const Table TABLE;

uint32_t of_block(int64_t block, int lane) {
    return static_cast<uint32_t>(mixed(~(uint64_t(block) * LANES + lane + 1)) | 1);
}

// Sums of the words of one block from place `first` on, each times its number of the table.
void block_sums(const int16_t* words, int64_t first, int64_t count, uint32_t* sums) {
    for (int64_t i = 0; i < count; ++i)
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += uint32_t(int32_t(TABLE.of[lane][first + i]) * words[i]);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) uint32_t total(__m256i sums) {
    alignas(32) uint32_t each[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(each), sums);
    uint32_t all = 0;
    for (uint32_t one : each) all += one;
    return all;
}

// Two whole blocks at once: the table, which fills the first-level cache, is read half as often. The next two are asked for, into
// the second-level cache: from memory that is half the time.
__attribute__((target("avx2"))) void two_blocks(const int16_t* words, uint32_t* first, uint32_t* second) {
    __m256i sums[2][LANES];
    for (auto& of_block : sums)
        for (auto& each : of_block) each = _mm256_setzero_si256();
    for (int64_t i = 0; i < BLOCK; i += 16) {
        if (i % 32 == 0) {  // once for each line
            _mm_prefetch(reinterpret_cast<const char*>(words + 2 * BLOCK + i), _MM_HINT_T1);
            _mm_prefetch(reinterpret_cast<const char*>(words + 3 * BLOCK + i), _MM_HINT_T1);
        }
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + BLOCK + i));
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; ++lane) {
            const __m256i factors = _mm256_load_si256(reinterpret_cast<const __m256i*>(TABLE.of[lane] + i));
            sums[0][lane] = _mm256_add_epi32(sums[0][lane], _mm256_madd_epi16(a, factors));
            sums[1][lane] = _mm256_add_epi32(sums[1][lane], _mm256_madd_epi16(b, factors));
        }
    }
    for (int lane = 0; lane < LANES; ++lane) first[lane] = total(sums[0][lane]), second[lane] = total(sums[1][lane]);
}

// Four of them, where there are registers for their sums, and one instruction multiplies and adds.
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void four_blocks(const int16_t* words, uint32_t (*sums)[LANES]) {
    __m512i all[4][LANES];
    for (auto& of_block : all)
        for (auto& each : of_block) each = _mm512_setzero_si512();
    for (int64_t i = 0; i < BLOCK; i += 32) {
        __m512i factors[LANES];
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; ++lane) factors[lane] = _mm512_load_si512(TABLE.of[lane] + i);
#pragma GCC unroll 4
        for (int block = 0; block < 4; ++block) {
            const int16_t* place = words + block * BLOCK + i;
            _mm_prefetch(reinterpret_cast<const char*>(place + 4 * BLOCK), _MM_HINT_T1);
            const __m512i x = _mm512_loadu_si512(place);
#pragma GCC unroll 4
            for (int lane = 0; lane < LANES; ++lane)
                all[block][lane] = _mm512_dpwssd_epi32(all[block][lane], x, factors[lane]);
        }
    }
    for (int block = 0; block < 4; ++block)
        for (int lane = 0; lane < LANES; ++lane) sums[block][lane] = _mm512_reduce_add_epi32(all[block][lane]);
}

#endif

// Sums of several whole blocks, of `count` that there are; returns how many.
int whole_blocks(const int16_t* words, int64_t count, uint32_t (*sums)[LANES]) {
#ifdef __x86_64__
    static const bool has_vnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (count >= 4 && has_vnni) return four_blocks(words, sums), 4;
    if (count >= 2 && has_avx2) return two_blocks(words, sums[0], sums[1]), 2;
#endif
    return 0;
}

void take(int64_t block, const uint32_t* sums, uint32_t* lanes) {
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] += of_block(block, lane) * sums[lane];
}

}  // namespace

// Types of caesura_pack_rows and caesura_equal_rows in scheduler/kernels/cpu/linear.cpp. Strides are in bytes, words of four.
typedef void Pack(void* packed, const void* rows, int64_t stride, int64_t start, int64_t n, int64_t words, int threads);
typedef int Equal(const void* packed, const void* rows, int64_t stride, int64_t start, int64_t n, int64_t words, int threads);

// Adds the lanes of `count` words from number `start` on to `lanes`.
CAESURA_API void caesura_words_digest(const int16_t* words, int64_t count, int64_t start, uint32_t* lanes) {
    while (count > 0) {
        const int64_t block = start / BLOCK, first = start % BLOCK;
        int64_t length = BLOCK - first;
        if (length > count) length = count;
        uint32_t sums[4][LANES] = {};
        const int whole = first ? 0 : whole_blocks(words, count / BLOCK, sums);
        if (whole)
            length = whole * BLOCK;
        else
            block_sums(words, first, length, sums[0]);
        for (int i = 0; i < (whole ? whole : 1); ++i) take(block + i, sums[i], lanes);
        words += length, start += length, count -= length;
    }
}

// Does the same for n rows of `width` words, and copies them to rows [row, row + n) of `target`, by `pack` unless it is null: a
// few rows at a time, while the second-level cache holds them.
CAESURA_API void caesura_words_digest_copied(const int16_t* rows, int64_t n, int64_t width, int64_t start, uint32_t* lanes,
                                             Pack* pack, void* target, int64_t row) {
    constexpr int64_t BYTES = 128 << 10, MULTIPLE = 32;  // rows of a panel, whose lines are then written whole
    const int64_t count = n * width, most = BYTES / (2 * width) / MULTIPLE * MULTIPLE, step = most ? most : MULTIPLE;
    int64_t digested = 0, done = 0;
    while (done < n) {
        int64_t end = (row + done + step) / MULTIPLE * MULTIPLE - row;
        if (end > n) end = n;
        // Up to the end of four blocks: several at once are faster.
        int64_t until = (start + end * width + 4 * BLOCK - 1) / (4 * BLOCK) * (4 * BLOCK) - start;
        if (until > count) until = count;
        caesura_words_digest(rows + digested, until - digested, start + digested, lanes);
        digested = until;
        const int16_t* block = rows + done * width;
        if (pack)
            pack(target, block, 2 * width, row + done, end - done, width / 2, 1);
        else
            __builtin_memcpy(static_cast<int16_t*>(target) + (row + done) * width, block, 2 * (end - done) * width);
        done = end;
    }
}

// Scales of blocks of `height` outputs, stored for each output: `words` lines of `outputs`, `line` bytes apart.
struct Spread {
    char* lines;
    int64_t line, height, outputs;
};

// A Pack of scales [n, words]: row r is that of outputs [r * height, (r + 1) * height).
CAESURA_API void caesura_words_spread(void* spread, const void* rows, int64_t stride, int64_t start, int64_t n,
                                      int64_t words, int) {
    const auto& to = *static_cast<const Spread*>(spread);
    for (int64_t word = 0; word < words; word++) {
        auto* line = reinterpret_cast<uint32_t*>(to.lines + word * to.line);
        for (int64_t r = 0; r < n; r++) {
            uint32_t scale;
            __builtin_memcpy(&scale, static_cast<const char*>(rows) + r * stride + word * 4, 4);
            const int64_t first = (start + r) * to.height, end = first + to.height;
            for (int64_t i = first; i < end && i < to.outputs; i++) line[i] = scale;
        }
    }
}

// Its Equal: the outputs of a block have the same scale.
CAESURA_API int caesura_words_spread_equal(const void* spread, const void* rows, int64_t stride, int64_t start, int64_t n,
                                           int64_t words, int) {
    const auto& to = *static_cast<const Spread*>(spread);
    for (int64_t r = 0; r < n; r++)
        for (int64_t word = 0; word < words; word++)
            if (__builtin_memcmp(to.lines + word * to.line + (start + r) * to.height * 4,
                                 static_cast<const char*>(rows) + r * stride + word * 4, 4))
                return 0;
    return 1;
}

// A whole tensor that is copied as it is, and what came of it: scheduler/weights/write_plan.py has the same structure.
struct Planned {
    int64_t offset, rows, width;  // its bytes in the source; words of a row
    char* target;
    int64_t row;
    Pack* pack;  // null, with `equal`: rows are stored as they come
    Equal* equal;
    int64_t changed;
    uint32_t lanes[LANES];
};

// Writes tensors where bytes differ, and digests them all.
CAESURA_API void caesura_words_write(Planned* tensors, int64_t count, const char* source) {
    for (Planned* tensor = tensors; tensor < tensors + count; tensor++) {
        const auto* rows = reinterpret_cast<const int16_t*>(source + tensor->offset);
        const int64_t n = tensor->rows, width = tensor->width, row = tensor->row;
        const bool same = tensor->equal ? tensor->equal(tensor->target, rows, 2 * width, row, n, width / 2, 1)
                                        : __builtin_memcmp(tensor->target + 2 * row * width, rows, 2 * n * width) == 0;
        __builtin_memset(tensor->lanes, 0, sizeof tensor->lanes);
        if (same)
            caesura_words_digest(rows, n * width, 0, tensor->lanes);
        else
            caesura_words_digest_copied(rows, n, width, 0, tensor->lanes, tensor->pack, tensor->target, row);
        tensor->changed = !same;
    }
}

// Adds to `lanes` what replacing the words at `positions` (int32, or int64 if `wide`) changes.
CAESURA_API void caesura_words_digest_change(const void* positions, int wide, const int16_t* before,
                                             const int16_t* after, int64_t count, uint32_t* lanes) {
    int64_t last = -1;  // block of `factors`
    uint32_t factors[LANES] = {};
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = wide ? static_cast<const int64_t*>(positions)[i] : static_cast<const int32_t*>(positions)[i];
        if (at / BLOCK != last) {
            last = at / BLOCK;
            for (int lane = 0; lane < LANES; ++lane) factors[lane] = of_block(last, lane);
        }
        const uint32_t change = uint32_t(after[i]) - uint32_t(before[i]);
        for (int lane = 0; lane < LANES; ++lane)
            lanes[lane] += factors[lane] * uint32_t(TABLE.of[lane][at % BLOCK]) * change;
    }
}
