// y[M, N] = x[M, K] @ w[N, K]^T + bias, the weight packed into storage of its own.
//
// The layout counts in *words* of four bytes: one float, or two neighbouring values of a row in bfloat16 or fp16 (so K is
// even there). W words to a row, padded to tiles of 16; N outputs padded to panels of 32:
//
//     word w of output n:  [n / 32] [w / 16] [n / 16 % 2] [w % 16] [n % 16]
//                           panel    tile     half         word     output
//
//     panel 0: | tile 0: 16 x 16 of outputs 0..15 | 16 x 16 of outputs 16..31 | tile 1: ... |
//
// A word of an fp8 or int8 weight is four neighbouring values of a row. They and fp16 become wider before they are multiplied:
// linear_unpacked.h, linear_int8.h.
//
// One 64-byte line is one word of 16 outputs: what a vector register holds, to be multiplied by one broadcast word of x. A
// panel is read from its first byte to its last, each line once per block of rows. Half a tile is what AMX calls one, too.
//
// Invariants:
// - An element of y is one chain of sums over the words in ascending order, then the bias, then one rounding: the same
//   bits whatever M, the block it falls into, or the thread.
// - Padding is written by nobody: storage starts zeroed and stays so there, so that equal weights are equal bytes.
#ifndef CAESURA_ISA

#include "operations.h"

#include <type_traits>

using namespace caesura;

namespace {

constexpr int64_t PANEL = 32, TILE = 16, HALF = 16 * TILE;  // words

// How far ahead of its use a line of the weight is asked for, in words: four tiles, 8 KB. The processor's own prefetcher
// loses the track where rows of x are read beside it. Into the second-level cache: the first has room for few lines under way
// (docs/contributing/experiments.md: half the time on Zen 4). Where a panel is gone through several times, memory is idle after the
// first: there the next panel is asked for meanwhile.
constexpr int64_t AHEAD = 4 * 2 * HALF;

// Of a row of a weight.
template <class E>
int64_t weight_words(int64_t inputs, const float* scales, E) {
    return inputs * (int64_t)(scales ? sizeof(fp8) : sizeof(E)) / 4;
}

CAESURA_INLINE const float* panel_start(const Linear& a, int64_t number) {
    return (const float*)a.weight + number * PANEL * round_up(a.words, TILE);
}

// Between the packed layout and rows [n, words]. Both directions and the comparison share one walk.
enum Walk { PACK, UNPACK, EQUAL };

}  // namespace

#define CAESURA_FILE "linear.cpp"
#include "each_isa.h"
#if defined(__x86_64__)
#include "linear_amx.h"
#endif

namespace {

// What of x a thread goes through before it comes to the next panel: it should stay in the second-level cache. With fewer
// rows than these a weight would be read again before it has been made use of; AMX is done sooner.
constexpr int64_t CHUNK_BYTES = 384 << 10, CHUNK_ROWS = 48, AMX_CHUNK_ROWS = 256;
// Multiplications that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 16;

// A row of x.
template <class W, class E>
int64_t x_bytes(const Linear& a) {
    return a.words * 4 * (int64_t)(sizeof(E) / sizeof(W));
}

int64_t cached_rows(int64_t x_bytes) {
#if defined(__x86_64__)
    const int64_t least = caesura::active_isa == AMX ? AMX_CHUNK_ROWS : CHUNK_ROWS;
#else
    constexpr int64_t least = CHUNK_ROWS;
#endif
    const int64_t fitting = CHUNK_BYTES / x_bytes;
    return fitting < least ? least : fitting;
}

// Tasks are (chunk of rows, panel), panels innermost. With few panels there are more chunks, so that the threads' shares are
// nearly equal.
int64_t chunk_rows(const Linear& a, int64_t x_bytes, int64_t panels, int threads) {
    const int64_t most = cached_rows(x_bytes);
    int64_t chunks = (a.rows + most - 1) / most;
    const int64_t wanted = (4 * threads + panels - 1) / panels, possible = a.rows / CHUNK_ROWS;
    if (chunks < wanted) chunks = wanted < possible ? wanted : possible;
    return chunks <= 1 ? a.rows : (a.rows + chunks - 1) / chunks;
}

#if defined(__x86_64__)
// Of int8 weights: fewer rows than these wait for memory either way, and for tiles longer.
bool by_tiles(const Linear& a) { return caesura::active_isa == AMX && a.rows > 4; }
#endif

// Of weights W with x of E.
template <class W, class E>
void panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
#if defined(__x86_64__)
    if constexpr (std::is_same_v<W, bf16>)
        if (caesura::active_isa == AMX) return amx::panel_rows(a, panel, row, end);
    if constexpr (std::is_same_v<W, int8>)
        if (by_tiles(a)) return amx::int8_panel_rows<E>(a, panel, row, end);
#endif
    CAESURA_DISPATCH(panel_rows<W, E>(a, panel, row, end));
}

template <class W, class E>
void all_panels(const Linear& a, Team& team) {
    const int64_t panels = round_up(a.outputs, PANEL) / PANEL, chunk = chunk_rows(a, x_bytes<W, E>(a), panels, team.size);
    const int64_t tasks = panels * ((a.rows + chunk - 1) / chunk);
    team.each(tasks, [&](int64_t task, int64_t) {
        const int64_t row = task / panels * chunk, end = smaller(row + chunk, a.rows);
        panel_rows<W, E>(a, task % panels, row, end);
    });
}

template <class E>
void int8_panels(const Linear& a, Team& team) {
    team.each(a.rows, [&](int64_t row, int64_t) {
        char* to = (char*)a.narrow + row * narrow_row_bytes(a.words);
        const E* x = (const E*)((const char*)a.x + row * a.x_stride);
#if defined(__x86_64__)
        if (by_tiles(a)) return amx::narrow_row(x, a.words * 4, to);
#endif
        CAESURA_DISPATCH(narrow_row(x, a.words * 4, to));
    });
    all_panels<int8, E>(a, team);
}

template <class E>
void linear_alone(const Linear& a, int threads) {
    if (a.rows == 0) return;
    run_team(threads, a.rows * a.outputs * a.words > PARALLEL, [&](Team& team) { linear(a, team, E()); });
}

// Rows in groups. They differ in size, so there are tasks without rows; threads help each other with the rest.
template <class W, class E>
void all_groups(const Linear& a, const Groups& groups, Team& team) {
    const int64_t panels = round_up(a.outputs, PANEL) / PANEL, chunk = cached_rows(x_bytes<W, E>(a)), count = *groups.count;
    int64_t most = 0;
    for (int64_t g = 0; g < count; g++) most = groups.starts[g + 1] - groups.starts[g] > most ? groups.starts[g + 1] - groups.starts[g] : most;
    const int64_t chunks = (most + chunk - 1) / chunk;
    team.each(count * chunks * panels, [&](int64_t task, int64_t) {
        const int64_t g = task / (chunks * panels), row = groups.starts[g] + task / panels % chunks * chunk;
        const int64_t end = smaller(row + chunk, groups.starts[g + 1]), expert = groups.experts[g];
        if (row >= end) return;
        Linear of_group = a;
        of_group.weight = panel_start(a, expert * panels);
        if (a.bias) of_group.bias = (const E*)a.bias + expert * a.outputs;
        if (a.scales) of_group.scales += expert * panels * PANEL * ((a.words + a.scale_words - 1) / a.scale_words);
        panel_rows<W, E>(of_group, task % panels, row, end);
    });
}

template <class E>
void all_batches(const Linear& a, const Batch& batch, Team& team) {
    const int64_t panels = round_up(a.outputs, PANEL) / PANEL, chunk = chunk_rows(a, x_bytes<E, E>(a), panels * batch.count, team.size);
    if (a.rows == 0) return team.each(0, [](int64_t, int64_t) {});
    const int64_t chunks = (a.rows + chunk - 1) / chunk;
    team.each(batch.count * chunks * panels, [&](int64_t task, int64_t) {
        const int64_t number = task / (chunks * panels), row = task / panels % chunks * chunk;
        Linear one = a;
        one.weight = panel_start(a, number * panels);
        one.x = (const char*)a.x + number * batch.x_bytes;
        one.y = (E*)a.y + number * batch.y_elements;
        panel_rows<E, E>(one, task % panels, row, smaller(row + chunk, a.rows));
    });
}

// Outputs [start, start + n) against `rows`; stops soon after the first difference.
template <Walk W>
bool walk(float* packed, char* rows, int64_t stride, int64_t start, int64_t n, int64_t words, int threads) {
    const int64_t end = start + n, row_words = round_up(words, TILE);
    bool same = true;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * words > PARALLEL)
    for (int64_t group = start / 16; group < (end + 15) / 16; group++) {
        bool go_on;
#pragma omp atomic read
        go_on = same;
        if (!go_on) continue;
        const int64_t first = group * 16 > start ? group * 16 : start, last = smaller(end, group * 16 + 16);
        float* tile = packed + group / 2 * PANEL * row_words + group % 2 * HALF + first % 16;
        char* row = rows + (first - start) * stride;
        // What this thread comes to next, if there is as much.
        const char* later = end - last >= 16 ? row + (last - first) * stride : row;
        bool equal = true;
        CAESURA_DISPATCH(walk_halves<W>(tile, row, later, stride, last - first, words, equal));
#if defined(__x86_64__)
        if constexpr (W == PACK) _mm_sfence();  // orders the streamed lines before what other threads see next
#endif
        if (!equal) {
#pragma omp atomic write
            same = false;
        }
    }
    return same;
}

}  // namespace

#define CAESURA_LINEAR(NAME, E)                                                                                            \
    void caesura::linear(const Linear& a, Team& team, E) {                                                                 \
        a.narrow ? int8_panels<E>(a, team) : a.scales ? all_panels<fp8, E>(a, team) : all_panels<E, E>(a, team);           \
    }                                                                                                                      \
    void caesura::grouped_linear(const Linear& a, const Groups& groups, Team& team, E) {                                   \
        a.scales ? all_groups<fp8, E>(a, groups, team) : all_groups<E, E>(a, groups, team);                                \
    }                                                                                                                      \
    void caesura::batched_linear(const Linear& a, const Batch& batch, Team& team, E) { all_batches<E>(a, batch, team); }    \
    CAESURA_API void caesura_linear_##NAME(const void* x, int64_t x_stride, const void* weight, const float* scales,       \
                                           int64_t scale_columns, const void* bias, void* y, int64_t y_stride,             \
                                           int64_t rows, int64_t outputs, int64_t inputs, int wide, void* narrow,          \
                                           int threads) {                                                                  \
        linear_alone<E>({x, x_stride * (int64_t)sizeof(E), weight, bias, y, y_stride, rows, outputs,                       \
                         weight_words(inputs, scales, E()), wide != 0, scales, scale_columns / 4, narrow}, threads);       \
    }                                                                                                                      \
    /* Contiguous x and y. */                                                                                              \
    CAESURA_API void caesura_grouped_linear_##NAME(const void* x, const void* weight, const float* scales,                 \
                                                   int64_t scale_columns, const void* bias, void* y,                       \
                                                   const int64_t* experts, const int64_t* starts, int64_t groups,          \
                                                   int64_t outputs, int64_t inputs, int threads) {                         \
        const Linear a = {x, inputs * (int64_t)sizeof(E), weight, bias, y, outputs, starts[groups], outputs,               \
                          weight_words(inputs, scales, E()), false, scales, scale_columns / 4};                            \
        run_team(threads, a.rows * outputs * a.words > PARALLEL,                                                           \
                 [&](Team& team) { grouped_linear(a, {experts, starts, &groups}, team, E()); });                           \
    }                                                                                                                      \
    /* Strides and distances in elements. */                                                                               \
    CAESURA_API void caesura_batched_linear_##NAME(const void* x, int64_t x_stride, int64_t x_next, const void* weight,    \
                                                   void* y, int64_t y_stride, int64_t y_next, int64_t count, int64_t rows, \
                                                   int64_t outputs, int64_t inputs, int threads) {                         \
        const int64_t size = sizeof(E);                                                                                    \
        const Linear a = {x, x_stride * size, weight, nullptr, y, y_stride, rows, outputs, inputs * size / 4};             \
        run_team(threads, count * rows * outputs * a.words > PARALLEL,                                                     \
                 [&](Team& team) { batched_linear(a, {count, x_next * size, y_next}, team, E()); });                       \
    }
CAESURA_EACH_TYPE(CAESURA_LINEAR)

// From here on strides are in bytes, and `words` is the length of a row.
CAESURA_API void caesura_pack_rows(void* packed, const void* rows, int64_t stride, int64_t start, int64_t n,
                                   int64_t words, int threads) {
    walk<PACK>((float*)packed, (char*)rows, stride, start, n, words, threads);
}

CAESURA_API void caesura_unpack_rows(const void* packed, void* rows, int64_t stride, int64_t start, int64_t n,
                                     int64_t words, int threads) {
    walk<UNPACK>((float*)packed, (char*)rows, stride, start, n, words, threads);
}

// 1 where every byte is the same, else 0.
CAESURA_API int caesura_equal_rows(const void* packed, const void* rows, int64_t stride, int64_t start, int64_t n,
                                   int64_t words, int threads) {
    return walk<EQUAL>((float*)packed, (char*)rows, stride, start, n, words, threads);
}

// out[i] = row ids[i] of `outputs` many. 0, and nothing written, where an id is out of range, else 1.
CAESURA_API int caesura_gather_rows(const void* packed, const int64_t* ids, void* out, int64_t stride, int64_t n,
                                    int64_t outputs, int64_t words, int threads) {
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= outputs) return 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (n * words > PARALLEL)
    for (int64_t i = 0; i < n; i++)
        walk<UNPACK>((float*)packed, (char*)out + i * stride, stride, ids[i], 1, words, 1);
    return 1;
}

#else

namespace CAESURA_ISA {

// From the first vector of outputs to the second, in words: the other half of the tile, or of the half.
constexpr int64_t NEXT = LANES == 16 ? HALF : LANES;

// A block is R rows by two vectors of outputs: 2 R sums in registers, two of the weight, one of x (and without bfloat16
// instructions the halves of each word).
template <class E>
constexpr int ROWS = LANES == 16 ? 12 : sizeof(Computed<E>) == 4 ? 6 : 4;
template <class E>
CAESURA_INLINE void store_outputs(const Linear& a, int64_t row, int64_t output, F sum) {
    const int64_t count = a.outputs - output;
    if (count <= 0) return;
    if (a.wide) {
        float* wide = (float*)a.y + row * a.y_stride + output;
        return count >= LANES ? store(wide, sum) : store(wide, sum, count);
    }
    const E* bias = a.bias ? (const E*)a.bias + output : nullptr;
    E* y = (E*)a.y + row * a.y_stride + output;
    if (count >= LANES) {
        store(y, bias ? add(sum, load(bias)) : sum);
    } else {
        store(y, bias ? add(sum, load(bias, count)) : sum, count);
    }
}

// Rows [row, row + R) of the outputs [output, output + 2 LANES); `w` is the first line of these outputs. A line of `later` is
// asked for with each word; ONCE: this is the only time that these lines are read.
template <class E, int R, bool ONCE>
static void block(const Linear& a, int64_t row, const float* w, int64_t output, const float* later) {
    const char* x = (const char*)a.x + row * a.x_stride;
    F sum[R][2];
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = zero();
    for (int64_t begin = 0; begin < a.words; begin += TILE, w += 2 * HALF) {
        const int64_t count = smaller(a.words - begin, TILE);
        for (int64_t i = 0; i < count; i++, x += 4) {
            const F left = load_words(w + i * 16), right = load_words(w + i * 16 + NEXT);
            if constexpr (ONCE) {
                fetch_second(w + i * 16 + AHEAD);
                fetch_second(w + i * 16 + AHEAD + HALF);
            } else {
                fetch_second(later);
                later += 16;
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const F value = set1_word(x + r * a.x_stride);
                sum[r][0] = dot(sum[r][0], value, left, E());
                sum[r][1] = dot(sum[r][1], value, right, E());
            }
        }
    }
    for (int r = 0; r < R; r++) {
        store_outputs<E>(a, row + r, output, sum[r][0]);
        store_outputs<E>(a, row + r, output + LANES, sum[r][1]);
    }
}

template <class E, int R, bool ONCE>
static void block_of(int rows, const Linear& a, int64_t row, const float* w, int64_t output, const float* later) {
    if (rows == R) return block<E, R, ONCE>(a, row, w, output, later);
    if constexpr (R > 1) block_of<E, R - 1, ONCE>(rows, a, row, w, output, later);
}

#include "linear_unpacked.h"
#include "linear_int8.h"

// Rows [row, end) of one panel, in blocks of nearly equal size.
template <class E>
static void whole_panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    const int64_t rows = end - row, blocks = (rows + ROWS<E> - 1) / ROWS<E>;
    if (blocks * PANEL == 2 * LANES) {
        return block_of<E, ROWS<E>, true>((int)rows, a, row, panel_start(a, panel), panel * PANEL, nullptr);
    }
    const float* next = panel_start(a, panel + 1);  // two times `words` lines; beyond the last panel nothing is read
    for (int64_t column = 0; column < PANEL; column += 2 * LANES) {
        const float* w = panel_start(a, panel) + column * TILE;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
            const float* later = column == 0 && b == 0 ? next : next + a.words * 16;
            block_of<E, ROWS<E>, false>((int)(last - first), a, row + first, w, panel * PANEL + column, later);
        }
    }
}

template <class W, class E>
static void panel_rows(const Linear& a, int64_t panel, int64_t row, int64_t end) {
    if constexpr (std::is_same_v<W, int8>) {
        int8_panel_rows<E>(a, panel, row, end);
    } else if constexpr (sizeof(W) < sizeof(Computed<E>)) {
        unpacked_panel_rows<W, E>(a, panel, row, end);
    } else {
        whole_panel_rows<E>(a, panel, row, end);
    }
}

// 16 outputs times 16 words: a half of a tile. Whole lines are written past the caches, which then need not read them first.
template <Walk W>
static bool whole_half(float* packed, char* rows, int64_t stride) {
    F differences = zero();
    for (int64_t word = 0; word < TILE; word += LANES, packed += LANES * 16, rows += LANES * 4) {
        for (int64_t output = 0; output < 16; output += LANES) {
            F x[LANES];
            float* line = packed + output;
            char* row = rows + output * stride;
            for (int i = 0; i < LANES; i++) x[i] = load_words(W == UNPACK ? (void*)(line + i * 16) : row + i * stride);
            transpose(x);
            for (int i = 0; i < LANES; i++) {
                if constexpr (W == PACK) stream(line + i * 16, x[i]);
                if constexpr (W == UNPACK) store((float*)(row + i * stride), x[i]);
                if constexpr (W == EQUAL) differences = either(differences, difference(x[i], load_words(line + i * 16)));
            }
        }
    }
    return !any(differences);
}

template <Walk W>
static bool part_of_half(float* packed, char* rows, int64_t stride, int64_t outputs, int64_t words) {
    bool same = true;
    for (int64_t output = 0; output < outputs; output++) {
        for (int64_t word = 0; word < words; word++) {
            float* here = packed + word * 16 + output;
            char* there = rows + output * stride + word * 4;
            if constexpr (W == PACK) std::memcpy(here, there, 4);
            if constexpr (W == UNPACK) std::memcpy(there, here, 4);
            if constexpr (W == EQUAL) same &= std::memcmp(here, there, 4) == 0;
        }
    }
    return same;
}

// All words of at most 16 outputs that lie in one half of each tile, from `packed` on; stops after a difference. `later` are
// the rows after these, asked for in the order in which they lie: sixteen rows read side by side are too many tracks for
// the processor's own prefetchers.
template <Walk W>
static void walk_halves(float* packed, char* rows, const char* later, int64_t stride, int64_t outputs, int64_t words,
                        bool& same) {
    for (int64_t word = 0; word < words && same; word += TILE, packed += 2 * HALF, rows += TILE * 4) {
        const int64_t count = smaller(TILE, words - word);
        if constexpr (W != UNPACK)
            for (int64_t i = 0; i < 16; i++) fetch_first(later + word * 64 + i * 64);
        if constexpr (W != PACK)
            for (int64_t i = 0; i < 16; i++) fetch_first(packed + AHEAD + i * 16);
        same = outputs == 16 && count == TILE ? whole_half<W>(packed, rows, stride)
                                              : part_of_half<W>(packed, rows, stride, outputs, count);
    }
}

}  // namespace CAESURA_ISA

#endif
