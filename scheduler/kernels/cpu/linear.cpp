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
// A word of an fp8 or int8 weight is four neighbouring values of a row, or eight of four bits. Floating-point weights meet
// rows of x as linear_float.h takes them; whole numbers meet such of x (linear_int8.h).
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
#if defined(__x86_64__)
#include "tiles.h"
#endif

#include <optional>
#include <type_traits>

using namespace caesura;

namespace {

constexpr int64_t PANEL = 32, TILE = 16, HALF = 16 * TILE;  // words

// Distance ahead of its use at which a line of the weight is prefetched, in words: four tiles, 8 KB. The processor's own prefetcher
// loses the track where rows of x are read beside it. Into the second-level cache: the first has room for few lines under way
// (docs/contributing/experiments.md: half the time on Zen 4). Where a panel is gone through several times, memory is idle after the
// first: there the next panel is asked for meanwhile.
constexpr int64_t AHEAD = 4 * 2 * HALF;

// Size of the chunk of x that a thread multiplies by a panel before the next one: it should stay in the second-level cache. Chunks
// of fewer rows would read a weight again too soon; AMX needs more rows, as it multiplies faster.
constexpr int64_t CHUNK_BYTES = 400 << 10, INPUT_WORDS = CHUNK_BYTES / 4, CHUNK_ROWS = 48, AMX_CHUNK_ROWS = 256;

// Rows of x as products with floating-point weights take them, in a thread's own memory. They are taken once for all panels.
struct Inputs {
    const void* x = nullptr;  // where the first of them lies
    int64_t rows, values, stride;
    alignas(64) float words[INPUT_WORDS];
};

// Elements of a word of a weight.
template <class E>
int64_t values_of(const float* scales, const int8_t* numbers, E) {
    return numbers ? VALUES<int4> : scales ? VALUES<int8> : VALUES<E>;
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

// Multiplications that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 16;

// Rows of a chunk, at most.
template <class W, class E>
int64_t most_rows(const Linear& a) {
#if defined(__x86_64__)
    if constexpr (std::is_same_v<W, bf16> || std::is_same_v<W, int8>)
        if (caesura::active_isa == AMX) return larger(AMX_CHUNK_ROWS, CHUNK_BYTES / (a.words * 4));
#endif
    int64_t rows;
    CAESURA_DISPATCH(count_rows<W, E>(a, rows));
    return rows;
}

// Tasks are (chunk of rows, panel), panels innermost. With few panels there are more chunks, so that the threads' shares are
// nearly equal.
int64_t chunk_rows(const Linear& a, int64_t most, int64_t panels, int threads) {
    int64_t chunks = (a.rows + most - 1) / most;
    const int64_t wanted = (4 * threads + panels - 1) / panels, possible = a.rows / CHUNK_ROWS;
    if (chunks < wanted) chunks = wanted < possible ? wanted : possible;
    return chunks <= 1 ? a.rows : (a.rows + chunks - 1) / chunks;
}

#if defined(__x86_64__)
// Int8 weights: with fewer rows than these a product waits for memory either way, and longer with tiles. Codes are no bytes.
bool by_tiles(const Linear& a) { return caesura::active_isa == AMX && a.rows > 4 && !a.numbers; }
#endif

// Multiplies rows of x, of E, by panels of W: a thread's part of a stage.
template <class W, class E>
struct Multiplier {
    Inputs inputs;
#if defined(__x86_64__)
    std::optional<amx::Products> tiles;
#endif

    Multiplier() {
#if defined(__x86_64__)
        if (std::is_same_v<W, bf16> && caesura::active_isa == AMX) tiles.emplace();
#endif
    }

    // Takes rows [row, end) and a panel, or one of a gate and that of what it multiplies. Results are there after finish().
    void add(const Linear& a, int64_t panel, int64_t row, int64_t end) {
#if defined(__x86_64__)
        if (tiles) return tiles->add(a, panel, row, end);
#endif
        panel_of(a, panel, row, end);
        if (!a.gate) return;
        panel_of(a, panel + a.gate->size / PANEL, row, end);
        const int64_t first = panel * PANEL * (int64_t)sizeof(E);
        Gate part = *a.gate;
        part.gate = (const char*)part.gate + first, part.up = (const char*)part.up + first, part.out = (char*)part.out + first;
        part.size = PANEL;
        gate_rows(part, row, end, E());
    }

    void finish() {
#if defined(__x86_64__)
        if (tiles) tiles->finish();
#endif
    }

   private:
    void panel_of(const Linear& a, int64_t panel, int64_t row, int64_t end) {
#if defined(__x86_64__)
        if constexpr (std::is_same_v<W, int8>)
            if (by_tiles(a)) return amx::int8_panel_rows<E>(a, panel, row, end);
#endif
        CAESURA_DISPATCH(panel_rows<W, E>(a, inputs, panel, row, end));
    }
};

// Panels that are tasks: with a gate, each with one of what it multiplies.
int64_t count_panels(const Linear& a) { return round_up(a.gate ? a.gate->size : a.outputs, PANEL) / PANEL; }

template <class W, class E>
void all_panels(const Linear& a, Team& team) {
    const int64_t each = a.rope ? a.rope->size / PANEL : 1, panels = count_panels(a) / each;
    const int64_t chunk = chunk_rows(a, most_rows<W, E>(a), panels, team.size), tasks = panels * ((a.rows + chunk - 1) / chunk);
    Multiplier<W, E> multiplier;
    team.each(tasks, [&](int64_t task, int64_t next) {
        const int64_t row = task / panels * chunk, end = smaller(row + chunk, a.rows), first = task % panels * each;
        for (int64_t panel = first; panel < first + each; panel++) multiplier.add(a, panel, row, end);
        if (a.rope || next < 0) multiplier.finish();
        if (a.rope) rope_rows(*a.rope, task % panels, row, end, E());
    });
}

// Rows of x in 8 bits, some to a task.
template <class E>
void narrow_rows(const Linear& a, Team& team) {
    constexpr int64_t ELEMENTS = 4096;
    const int64_t inputs = a.words * (a.numbers ? VALUES<int4> : VALUES<int8>), each = ELEMENTS / inputs + 1;
    team.each((a.rows + each - 1) / each, [&](int64_t task, int64_t) {
        for (int64_t row = task * each; row < smaller((task + 1) * each, a.rows); row++) {
            char* to = (char*)a.narrow + row * narrow_row_bytes(inputs);
            const E* x = (const E*)((const char*)a.x + row * a.x_stride);
            CAESURA_DISPATCH(narrow_row(x, inputs, a.numbers ? INT4_COLUMNS : INT8_COLUMNS, to));
        }
    });
}

template <class E>
void linear_alone(const Linear& a, int threads) {
    if (a.rows == 0) return;
    run_team(threads, a.rows * a.outputs * a.words > PARALLEL, [&](Team& team) { linear(a, team, E()); });
}

// Rows in groups. They differ in size, so there are tasks without rows; threads help each other with the rest.
template <class W, class E>
void all_groups(const Linear& a, const Groups& groups, Team& team) {
    const int64_t panels = count_panels(a), chunk = most_rows<W, E>(a), count = *groups.count;
    const int64_t weights = round_up(a.outputs, PANEL) / PANEL;  // panels of one
    int64_t most = 0;
    for (int64_t g = 0; g < count; g++) most = groups.starts[g + 1] - groups.starts[g] > most ? groups.starts[g + 1] - groups.starts[g] : most;
    const int64_t chunks = (most + chunk - 1) / chunk;
    Multiplier<W, E> multiplier;
    team.each(count * chunks * panels, [&](int64_t task, int64_t next) {
        const int64_t g = task / (chunks * panels), row = groups.starts[g] + task / panels % chunks * chunk;
        const int64_t end = smaller(row + chunk, groups.starts[g + 1]), expert = groups.experts[g];
        Linear of_group = a;
        of_group.weight = panel_start(a, expert * weights);
        if (a.bias) of_group.bias = (const E*)a.bias + expert * a.outputs;
        if (a.scales) of_group.scales += expert * weights * PANEL * ((a.words + a.scale_words - 1) / a.scale_words);
        if (row < end) multiplier.add(of_group, task % panels, row, end);
        if (next < 0) multiplier.finish();
    });
}

template <class E>
void all_batches(const Linear& a, const Batch& batch, Team& team) {
    const int64_t panels = round_up(a.outputs, PANEL) / PANEL, chunk = chunk_rows(a, most_rows<E, E>(a), panels * batch.count, team.size);
    if (a.rows == 0) return team.each(0, [](int64_t, int64_t) {});
    const int64_t chunks = (a.rows + chunk - 1) / chunk;
    Multiplier<E, E> multiplier;
    team.each(batch.count * chunks * panels, [&](int64_t task, int64_t next) {
        const int64_t number = task / (chunks * panels), row = task / panels % chunks * chunk;
        Linear one = a;
        one.weight = panel_start(a, number * panels);
        one.x = (const char*)a.x + number * batch.x_bytes;
        one.y = (E*)a.y + number * batch.y_elements;
        multiplier.add(one, task % panels, row, smaller(row + chunk, a.rows));
        if (next < 0) multiplier.finish();
    });
}

void unpack_row(const float* packed, int64_t row, int64_t words, char* out) {
    packed += row / PANEL * PANEL * round_up(words, TILE) + row % PANEL / 16 * HALF + row % 16;
    for (int64_t word = 0; word < words; word++)
        std::memcpy(out + word * 4, packed + word / TILE * 2 * HALF + word % TILE * 16, 4);
}

// Bytes ahead at which rows are asked for: caesura_words_digest_copied (transfer/weight_digest.cpp) packs so many at a time, and
// digests the next ones then.
constexpr int64_t LATER = 128 << 10;

// Outputs [start, start + n) against `rows`; stops soon after the first difference.
template <Walk W>
bool walk(float* packed, char* rows, int64_t stride, int64_t start, int64_t n, int64_t words, int threads) {
    const int64_t end = start + n, row_words = round_up(words, TILE);
    bool same = true;
#pragma omp parallel num_threads(threads) if (n * words > PARALLEL)
    {
#pragma omp for schedule(static) nowait
        for (int64_t group = start / 16; group < (end + 15) / 16; group++) {
            bool go_on;
#pragma omp atomic read
            go_on = same;
            if (!go_on) continue;
            const int64_t first = group * 16 > start ? group * 16 : start, last = smaller(end, group * 16 + 16);
            float* tile = packed + group / 2 * PANEL * row_words + group % 2 * HALF + first % 16;
            char* row = rows + (first - start) * stride;
            const char* later = row + LATER;
            bool equal = true;
            CAESURA_DISPATCH(walk_halves<W>(tile, row, later, stride, last - first, words, equal));
            if (!equal) {
#pragma omp atomic write
                same = false;
            }
        }
#if defined(__x86_64__)
        if constexpr (W == PACK) _mm_sfence();  // orders the streamed lines before what other threads see next
#endif
    }
    return same;
}

}  // namespace

void caesura::gather_packed(const PairRows& a, Team& team) {
    team.each(a.pairs, [&](int64_t i, int64_t) {
        unpack_row((const float*)a.x, a.tokens[i], a.bytes / 4, (char*)a.out + i * a.bytes);
    });
}

// FUNCTION<W, E>(a, ...), W being what the weight of `a` is stored as.
#define CAESURA_BY_WEIGHT(FUNCTION, E, a, ...)                        \
    do {                                                              \
        if (!a.scales) return FUNCTION<E, E>(a, __VA_ARGS__);         \
        if (!a.narrow) return FUNCTION<fp8, E>(a, __VA_ARGS__);       \
        if (!a.numbers) return FUNCTION<int8, E>(a, __VA_ARGS__);     \
        FUNCTION<int4, E>(a, __VA_ARGS__);                            \
    } while (0)

// Without what does not begin and end with panels, and has to follow as a stage of its own.
Linear within_panels(Linear a) {
    if (a.gate && a.gate->size % PANEL) a.gate = nullptr;
    if (a.rope && (a.rope->size % PANEL || a.rope->q_head != a.rope->size)) a.rope = nullptr;
    return a;
}

template <class E>
void multiply(const Linear& a, Team& team) {
    if (a.narrow) narrow_rows<E>(a, team);
    CAESURA_BY_WEIGHT(all_panels, E, a, team);
}

template <class E>
void multiply(const Linear& a, const Groups& groups, Team& team) {
    if (a.narrow) narrow_rows<E>(a, team);
    CAESURA_BY_WEIGHT(all_groups, E, a, groups, team);
}

#define CAESURA_LINEAR(NAME, E)                                                                                            \
    void caesura::linear(const Linear& a, Team& team, E) {                                                                 \
        const Linear within = within_panels(a);                                                                            \
        multiply<E>(within, team);                                                                                         \
        if (a.gate && !within.gate) gate_mul(*a.gate, team, E());                                                          \
        if (a.rope && !within.rope) rope_store(*a.rope, team, E());                                                        \
    }                                                                                                                      \
    void caesura::grouped_linear(const Linear& a, const Groups& groups, Team& team, E) {                                   \
        const Linear within = within_panels(a);                                                                            \
        multiply<E>(within, groups, team);                                                                                 \
        if (a.gate && !within.gate) gate_mul(*a.gate, team, E());                                                          \
    }                                                                                                                      \
    void caesura::batched_linear(const Linear& a, const Batch& batch, Team& team, E) { all_batches<E>(a, batch, team); }    \
    CAESURA_API void caesura_linear_##NAME(const void* x, int64_t x_stride, const void* weight, const float* scales,       \
                                           int64_t scale_columns, const int8_t* numbers, const void* bias, void* y,        \
                                           int64_t y_stride, int64_t rows, int64_t outputs, int64_t inputs, int wide,      \
                                           void* narrow, int threads) {                                                    \
        const int64_t values = values_of(scales, numbers, E());                                                            \
        linear_alone<E>({x, x_stride * (int64_t)sizeof(E), weight, bias, y, y_stride, rows, outputs, inputs / values,      \
                         wide != 0, scales, scale_columns / values, narrow, numbers}, threads);                            \
    }                                                                                                                      \
    /* Contiguous x and y. */                                                                                              \
    CAESURA_API void caesura_grouped_linear_##NAME(const void* x, const void* weight, const float* scales,                 \
                                                   int64_t scale_columns, const int8_t* numbers, const void* bias,         \
                                                   void* y, const int64_t* experts, const int64_t* starts, int64_t groups, \
                                                   int64_t outputs, int64_t inputs, void* narrow, int threads) {           \
        const int64_t values = values_of(scales, numbers, E());                                                            \
        const Linear a = {x, inputs * (int64_t)sizeof(E), weight, bias, y, outputs, starts[groups], outputs,               \
                          inputs / values, false, scales, scale_columns / values, narrow, numbers};                        \
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

// Below, strides are in bytes, and `words` is the length of a row.
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

// out[i] = row ids[i] of `outputs` many, contiguous. 0, and nothing written, where an id is out of range, else 1.
CAESURA_API int caesura_gather_rows(const void* packed, const int64_t* ids, void* out, int64_t n, int64_t outputs,
                                    int64_t words, int threads) {
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= outputs) return 0;
    run_team(threads, n * words > PARALLEL, [&](Team& team) { gather_packed({packed, ids, out, n, words * 4}, team); });
    return 1;
}

#else

namespace CAESURA_ISA {

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

// Offset in a tile of vector `v` of the outputs of a panel.
constexpr int64_t offset_of(int64_t v) { return v * LANES / 16 * HALF + v * LANES % 16; }

template <class W>
constexpr bool IS_NUMBER = std::is_same_v<W, int8> || std::is_same_v<W, int4>;

// Words [word, word + count) of a panel; `tile` is that of the first, `word` a multiple of TILE.
struct Part {
    const float* tile;
    int64_t word, count;
    const float* scales = nullptr;  // of the panel
};

// What a block of rows asks for with each word of a part: a line of what is read later, or two of them.
struct Later {
    const float* lines;
    bool two, scales;  // scales: also those of the next panel
};

#include "elementwise.h"
#include "linear_float.h"
#include "linear_int8.h"

template <class W, class E, int R>
static void block_of(int64_t rows, const Linear& a, const Part& part, const float* x, int64_t stride, int64_t output,
                     const Later& later, float* sums) {
    if (rows == R) {
        if constexpr (IS_NUMBER<W>) {
            return number_block<W, E, R>(a, part, x, stride, output, later, sums);
        } else {
            return block<W, E, R>(a, part, x, stride, output, later.lines, later.two, sums);
        }
    }
    if constexpr (R > 1) block_of<W, E, R - 1>(rows, a, part, x, stride, output, later, sums);
}

// sums[rows, PANEL] += all rows of x, from `x` on, times a part, in blocks of nearly equal size. Those that read the part first
// ask for as much of `later`, in the order in which it lies; memory is idle afterwards.
template <class W, class E>
static void meet(const Linear& a, const Part& part, const float* x, int64_t stride, int64_t rows, const float* later, float* sums) {
    constexpr bool SIDES = LANES != 16;  // a panel is gone through twice
    const int64_t blocks = (rows + BLOCK_ROWS<W, E> - 1) / BLOCK_ROWS<W, E>;
    for (int64_t output = 0; output < PANEL; output += 2 * LANES) {
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
            const float* half = later + ((SIDES ? output : b) > 0 ? part.count * 16 : 0);
            block_of<W, E, BLOCK_ROWS<W, E>>(last - first, a, part, x + first * stride, stride, output,
                                             {SIDES && b > 0 ? part.tile : half, blocks == 1, b == 0},
                                             sums + first * PANEL + output);
        }
    }
}

// Rows of a chunk, at most.
template <class W, class E>
static void count_rows(const Linear& a, int64_t& rows) {
    const int64_t stride = IS_NUMBER<W> ? a.words * VALUES<W> / 4 : stride_of(a.words * STEPS<W, E>);
    rows = larger(LEAST_ROWS<W, E>, smaller(INPUT_WORDS / stride, MOST_ROWS<W>));
}

// Rows [row, end) of one panel: a chunk, or less.
template <class W, class E>
static void panel_rows(const Linear& a, Inputs& inputs, int64_t panel, int64_t row, int64_t end) {
    constexpr int64_t EACH = 4 / sizeof(W);
    const int64_t rows = end - row, row_words = round_up(a.words, TILE);
    const int64_t fitting = IS_NUMBER<W> ? a.words : (INPUT_WORDS / rows / 16 - 1) * 16 / STEPS<W, E> / PIECE * PIECE;
    const bool direct = FEW<W> == 0 || rows <= FEW<W>;
    const int64_t piece = !direct ? PIECE : LANES == 16 ? row_words : DIRECT_PIECE;
    const int64_t ahead = LANES == 16 && rows > BLOCK_ROWS<W, E> ? PANEL * row_words : AHEAD;
    alignas(64) float sums[MOST_ROWS<W> * PANEL];
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t word = 0; word < a.words; word += fitting) {
        Part part = {panel_start(a, panel) + word * PANEL, word, 0, a.scales ? a.scales + panel * PANEL : nullptr};
        const int64_t end_word = smaller(word + fitting, a.words);
        if constexpr (!IS_NUMBER<W>) take<E>(a, row, rows, word * EACH, (end_word - word) * EACH, inputs);
        for (; part.word < end_word; part.word += piece, part.tile += piece * PANEL) {
            part.count = smaller(piece, end_word - part.word);
            if constexpr (IS_NUMBER<W>) {
                const int64_t stride = narrow_row_bytes(a.words * VALUES<W>) / 4;
                meet<W, E>(a, part, (const float*)a.narrow + row * stride, stride, rows, part.tile + ahead, sums);
            } else {
                const float* x = inputs.words + (part.word - word) * STEPS<W, E>;
                if (direct) {
                    meet<W, E>(a, part, x, inputs.stride, rows, part.tile + ahead, sums);
                } else {
                    alignas(64) float lines[FEW<W> ? PANEL * PIECE * STEPS<W, E> : 1];
                    meet<Computed<E>, E>(a, unpack<W, E>(a, part, lines), x, inputs.stride, rows, part.tile + AHEAD, sums);
                }
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t output = 0; output < PANEL; output += LANES)
            store_outputs<E>(a, row + r, panel * PANEL + output, load(sums + r * PANEL + output));
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
// rows after these, asked for in the order in which they lie: sixteen rows read side by side are too many tracks for the
// processor's own prefetchers.
template <Walk W>
static void walk_halves(float* packed, char* rows, const char* later, int64_t stride, int64_t outputs, int64_t words,
                        bool& same) {
    for (int64_t word = 0; word < words && same; word += TILE, packed += 2 * HALF, rows += TILE * 4) {
        const int64_t count = smaller(TILE, words - word);
        if constexpr (W != UNPACK)
            for (int64_t i = 0; i < 16; i++) fetch_second(later + word * 64 + i * 64);
        if constexpr (W != PACK)
            for (int64_t i = 0; i < 16; i++) fetch_first(packed + AHEAD + i * 16);
        same = outputs == 16 && count == TILE ? whole_half<W>(packed, rows, stride)
                                              : part_of_half<W>(packed, rows, stride, outputs, count);
    }
}

}  // namespace CAESURA_ISA

#endif
