// Causal attention over paged KV, for decode and for chunks of a prefill alike.
//
// K and V of a layer are [page, kv head, 16, head size]. A task is some consecutive query tokens of one request and one
// kv head; its rows are (token, query head of the group), so that a group reads its K and V once. A task goes through
// the request's positions in blocks of 64 and keeps, per row, the largest score m, the sum of weights l and the weighted
// sum of values O (online softmax: Milakov and Gimelshein, 2018, arXiv:1805.02867):
//
//     S = q K^T * scale                m' = max(m, S)                P = exp(S - m')
//     l = l exp(m - m') + sum P        O = O exp(m - m') + P V       at the end: O / l
//
// A layer's form changes this in three places. A window: the blocks begin where the task's first token begins to see. A soft
// cap: S is bent before it is compared. A sink, which is one more score, whose value is zero: m and l begin with it.
//
// Both products count in *words* of four bytes: a float, or two neighbouring bfloat16 values, which one instruction
// multiplies and adds.
//
//     q K^T    lanes are words. A query meets a key as both lie in memory; sixteen results are then summed over their lanes
//              at once, by fold() and join().
//     P V      lanes are columns. A word of P meets two positions side by side: a block is packed so for a prefill, whose
//              rows share it; a decode step puts them together in registers.
//
// A decode step reads K and V once and has little to compute, so memory should never wait for it: what comes next is asked
// for line by line between the instructions, not in bursts, which stall it (25 against 22 GB/s of one thread).
//
// Invariants:
// - A row's result depends on its query and on the K and V of its positions alone, to the last bit: a score is a chain of
//   additions for each lane and one tree over the lanes, an output one chain over ascending words, blocks begin at
//   multiples of 64, and what a row may not see, behind it or before its window, is left out instead of multiplied by zero.
//   So neither the number of rows, nor chunks, pages or threads can show.
// - For that reason a request's positions are never divided among threads; kv heads and blocks of queries are.
// - What lies behind the last position of a request, or before the window of a task, is never used, whatever it holds.
// - bfloat16: weights P are rounded before they meet V, and l is the sum of the rounded ones; sums are float.
#ifndef CAESURA_ISA

#include "operations.h"

using namespace caesura;

namespace {

constexpr int64_t PAGE = 16, BLOCK = 64;
constexpr int MAX_TILE = 6;  // rows computed together, at most

struct HeadTask {
    Task task;
    int64_t head;
};

// One thread's memory, in floats; every part starts at a cache line.
template <class E>
struct Scratch {
    static constexpr int64_t PAIR = 4 / sizeof(E);
    int64_t words, columns;  // of a query or key, of a value; padded
    float *keys, *values, *queries, *sums, *largest, *weights, *scores, *probabilities, *end;

    Scratch(float* base, int64_t size, int64_t value_size, int64_t rows)
        : words(round_up((size + PAIR - 1) / PAIR, 16)), columns(round_up(value_size, 16)), end(base) {
        keys = take(words * BLOCK);
        values = take(BLOCK / PAIR * columns);
        queries = take(rows * words);
        sums = take(rows * columns);
        largest = take(rows);
        weights = take(rows);
        scores = take(MAX_TILE * BLOCK);
        probabilities = take(MAX_TILE * BLOCK / PAIR);
    }

    float* take(int64_t floats) {
        float* part = end;
        end += round_up(floats, 16);
        return part;
    }
};

template <class E>
int64_t scratch_floats(int64_t size, int64_t value_size, int64_t rows) {
    return Scratch<E>(nullptr, size, value_size, rows).end - (float*)nullptr;
}

}  // namespace

#define CAESURA_FILE "attention.cpp"
#include "each_isa.h"

namespace {

// Every task for every kv head. A thread knows its next before it begins, so that it can fetch what that one needs.
template <class E>
void all_tasks(const Attention& a, Team& team) {
    float* mine = a.scratch + team.thread * a.thread_floats;
    const auto of = [&](int64_t task) { return HeadTask{a.tasks[task / a.kv_heads], task % a.kv_heads}; };
    team.each(a.num_tasks * a.kv_heads, [&](int64_t task, int64_t next) {
        CAESURA_DISPATCH(attend<E>(a, of(task), of(next < 0 ? task : next), mine));
    });
}

}  // namespace

// Floats of scratch that each thread needs, 64-byte aligned; `rows`: the largest tokens * group of a task.
CAESURA_API int64_t caesura_attention_scratch_bf16(int64_t size, int64_t value_size, int64_t rows) {
    return scratch_floats<bf16>(size, value_size, rows);
}
CAESURA_API int64_t caesura_attention_scratch_f32(int64_t size, int64_t value_size, int64_t rows) {
    return scratch_floats<float>(size, value_size, rows);
}

#define CAESURA_ATTENTION(NAME, E)                                                                                     \
    void caesura::attention(const Attention& a, Team& team, E) { all_tasks<E>(a, team); }                              \
    CAESURA_API void NAME(const void* q, int64_t q_token, int64_t q_head, const void* keys, const void* values,        \
                          int64_t kv_heads, int64_t group, int64_t size, int64_t value_size, int64_t parts,            \
                          int64_t value_row, const int32_t* pages, int64_t pages_row,                                  \
                          const int64_t* tasks, int64_t num_tasks, int64_t window, float scale,     \
                          float softcap, const void* sinks, void* out, int64_t out_token, float* scratch,              \
                          int64_t thread_floats, int threads) {                                                        \
        const Form form = {window, scale, softcap, sinks};                                                             \
        const Attention a = {q, q_token, q_head, keys, values, kv_heads, group, size, value_size, parts, value_row,    \
                             pages, pages_row, (const Task*)tasks, num_tasks, form, out, out_token, scratch, thread_floats};             \
        run_team(threads, num_tasks * kv_heads > 1, [&](Team& team) { attention(a, team, E()); });                     \
    }
CAESURA_ATTENTION(caesura_attention_bf16, bf16)
CAESURA_ATTENTION(caesura_attention_f32, float)

#else

namespace CAESURA_ISA {

// A tile's sums fill the registers: rows times vectors of columns.
template <class E>
constexpr int TILE_ROWS = LANES == 16 || sizeof(E) == 4 ? 6 : 4;
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;

// out[R, C vectors] = out * factor + a[R, k] * b[k, C vectors], in words.
template <class E, int R, int C>
static void multiply_tile(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t k, const float* factors,
                          float* out, int64_t out_row) {
    F sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = mul(load(out + r * out_row + c * LANES), set1(factors[r]));
    for (int64_t i = 0; i < k; i++, a++, b += b_row) {
        F line[C];
        for (int c = 0; c < C; c++) line[c] = load_words(b + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const F value = set1_word(a + r * a_row);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], value, line[c], E());
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * out_row + c * LANES, sum[r][c]);
}

// The same for any number of columns, which is a multiple of the lanes.
template <class E, int R, int C = TILE_VECTORS>
static void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t k, const float* factors,
                     float* out, int64_t out_row, int64_t columns) {
    for (; columns >= C * LANES; columns -= C * LANES, b += C * LANES, out += C * LANES)
        multiply_tile<E, R, C>(a, a_row, b, b_row, k, factors, out, out_row);
    if constexpr (C > 1)
        if (columns > 0) multiply<E, R, C - 1>(a, a_row, b, b_row, k, factors, out, out_row, columns);
}

// A block of a task: its pages, and those that the thread needs afterwards, of this task or the next.
template <class E>
struct Block {
    int64_t count;  // positions
    const E *keys[BLOCK / PAGE], *values[BLOCK / PAGE], *later_keys[BLOCK / PAGE], *later_values[BLOCK / PAGE];

    Block(const Attention& a, const HeadTask& t, const HeadTask& next, int64_t begin)
        : count(smaller(t.task.end() - begin, BLOCK)) {
        const bool last = begin + BLOCK >= t.task.end();
        const HeadTask& after = last ? next : t;
        const int64_t after_begin = begin_of(a, next.task);
        for (int64_t i = 0; i < BLOCK / PAGE; i++) {
            const int64_t position = begin + i * PAGE, ahead = last ? after_begin + i * PAGE : position + BLOCK;
            const int64_t here = page_of(a, t, position < t.task.end() ? position : begin);
            const int64_t later = ahead < after.task.end() ? page_of(a, after, ahead) : here;
            keys[i] = (const E*)a.keys + here * a.size, values[i] = (const E*)a.values + here * a.value_row;
            later_keys[i] = (const E*)a.keys + later * a.size, later_values[i] = (const E*)a.values + later * a.value_row;
        }
    }

    // The first block that any token of a task sees.
    static int64_t begin_of(const Attention& a, const Task& t) { return a.form.first(t.position) / BLOCK * BLOCK; }

    // Where the page of a position lies, in tokens of one head.
    static int64_t page_of(const Attention& a, const HeadTask& t, int64_t position) {
        const int64_t page = a.pages[t.task.row * a.pages_row + position / PAGE];
        return (page * (a.kv_heads / a.parts) + t.head / a.parts) * PAGE;
    }
};

// Asked for ahead of its use, because the processor's own prefetchers stop at the end of a page.
CAESURA_INLINE void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

// Keys that are no whole number of lines are copied, and filled up with zeros.
template <class E>
static void copy_keys(Block<E>& block, int64_t size, const Scratch<E>& s) {
    for (int64_t i = 0; i * PAGE < block.count; i++) {
        float* page = s.keys + i * PAGE * s.words;
        std::memset(page, 0, PAGE * s.words * sizeof(float));
        for (int64_t j = 0; j < PAGE; j++)
            std::memcpy(page + j * s.words, block.keys[i] + j * size, size * sizeof(E));
        block.keys[i] = (const E*)page;
    }
}

// A line of n columns: a position's values, or those of it and of that `next` elements further on, side by side.
static void pack_line(const float* value, int64_t, int64_t n, float* line) { std::memcpy(line, value, n * 4); }
static void pack_line(const bf16* value, int64_t next, int64_t n, float* line) {
    F low, high;
    int64_t c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) {
        interleave(value + c, value + next + c, low, high);
        store(line + c, low), store(line + c + LANES, high);
    }
    if (c == n) return;
    bf16 rest[2][2 * LANES] = {};
    float words[2 * LANES];
    std::memcpy(rest[0], value + c, (n - c) * 2);
    std::memcpy(rest[1], value + next + c, (n - c) * 2);
    interleave(rest[0], rest[1], low, high);
    store(words, low), store(words + LANES, high);
    std::memcpy(line + c, words, (n - c) * 4);
}

// The block's values become lines. What comes beside an odd last position, and what is in padding columns, is not used.
template <class E>
static void pack_values(const Attention& a, const Block<E>& block, const Scratch<E>& s) {
    float* line = s.values;
    for (int64_t i = 0; i < block.count; i += s.PAIR, line += s.columns) {
        const int64_t page = i / PAGE, offset = i % PAGE * a.value_row;
        prefetch(block.later_keys[page] + i % PAGE * a.size, a.size * 4);
        if (a.values != a.keys) prefetch(block.later_values[page] + offset, a.value_size * 4);
        pack_line(block.values[page] + offset, a.value_row, a.value_size, line);
    }
}

// The scores of R queries and a page's keys, not yet scaled; meanwhile the page at `later` is fetched, if there is one.
template <class E, int R, bool FETCH>
static void score_page(const Scratch<E>& s, const float* queries, const E* keys, const E* later, float* scores) {
    const float* key = (const float*)keys;
    const char* ahead = (const char*)later;
    for (int64_t first = 0; first < PAGE; first += LANES, scores += LANES) {
        F folded[R][FOLDS];
#pragma GCC unroll 1
        for (int fours = 0; fours < FOLDS; fours++, key += 4 * s.words) {
            F sum[R][4];
            for (int r = 0; r < R; r++)
                for (int k = 0; k < 4; k++) sum[r][k] = zero();
            for (int64_t word = 0; word < s.words; word += LANES, ahead += 4 * LANES * 4) {
                F line[4];
                for (int k = 0; k < 4; k++) line[k] = load_words(key + k * s.words + word);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const F query = load_words(queries + r * s.words + word);
                    for (int k = 0; k < 4; k++) {
                        sum[r][k] = dot(sum[r][k], query, line[k], E());
                        if (FETCH && r == 0 && k % (16 / LANES) == 0) prefetch(ahead + k * LANES * 4, 64);
                    }
                }
            }
            for (int r = 0; r < R; r++) folded[r][fours] = fold(sum[r]);
        }
        for (int r = 0; r < R; r++) store(scores + r * BLOCK, join(folded[r]));
    }
}

// x as an E holds it.
CAESURA_INLINE F rounded(F x, float) { return x; }
CAESURA_INLINE F rounded(F x, bf16) { return widen(narrow(x)); }

// The positions of a block that a row sees.
struct Seen {
    int64_t first, end;
};

// Bent by the form's cap, if it has one.
CAESURA_INLINE F scaled(F score, const Form& form) {
    const F x = mul(score, set1(form.scale));
    return form.softcap > 0.0f ? mul(tanh(div(x, set1(form.softcap))), set1(form.softcap)) : x;
}

// The weights of one row's scores, of which it sees some; returns m - m', for the sums so far.
template <class E>
static float weigh(const float* scores, Seen seen, const Form& form, float& largest, float& weights, E* probabilities) {
    constexpr int N = BLOCK / LANES;
    const F lowest = set1(-INFINITY);
    F x[N], top = lowest, total = zero();
    for (int i = 0; i < N; i++) {
        // Overwritten, not added to: what lies there may be NaN.
        x[i] = keep_first(scaled(load(scores + i * LANES), form), seen.end - i * LANES, lowest);
        if (seen.first > i * LANES) x[i] = keep_first(lowest, seen.first - i * LANES, x[i]);
        top = max(x[i], top);
    }
    const float block_largest = reduce_max(top), before = largest;
    largest = block_largest > before ? block_largest : before;
    for (int i = 0; i < N; i++) {
        x[i] = exp(sub(x[i], set1(largest)));
        store(probabilities + i * LANES, x[i]);
        total = add(total, rounded(x[i], E()));
    }
    weights = reduce_add(total);
    return before - largest;
}

// The weights of R rows; `factors`: for the sums so far. A row that sees nothing stays as it is.
template <class E, int R>
static void weigh_rows(const Scratch<E>& s, const Form& form, int64_t row, const Seen* seen, float* factors) {
    float falls[LANES] = {}, weights[R] = {};
    for (int r = 0; r < R; r++)
        if (seen[r].first < seen[r].end)
            falls[r] = weigh(s.scores + r * BLOCK, seen[r], form, s.largest[row + r], weights[r],
                             (E*)s.probabilities + r * BLOCK);
    store(factors, exp(load(falls)));
    for (int r = 0; r < R; r++) s.weights[row + r] = s.weights[row + r] * factors[r] + weights[r];
}

// sums = sums * factor + weight * values, for a line of which only one half is seen.
template <class E, bool LOW>
static void add_half(const float* weight, const float* values, float factor, float* sums, int64_t columns) {
    const F value = set1_word(weight);
    for (int64_t c = 0; c < columns; c += LANES) {
        const F words = load(values + c), half = LOW ? keep_low(words) : keep_high(words);
        store(sums + c, dot(mul(load(sums + c), set1(factor)), value, half, E()));
    }
}

// The rest of a row's values: lines [line, end / pair) and, if the last line is only half seen, that half. The sums so far
// are multiplied by `factor`, if there is anything.
template <class E>
static void add_rest(const Scratch<E>& s, int64_t row, const float* probabilities, int64_t line, int64_t end, float factor) {
    const int64_t whole = end / s.PAIR;
    float* sums = s.sums + row * s.columns;
    if (line < whole) {
        multiply<E, 1>(probabilities + line, 0, s.values + line * s.columns, s.columns, whole - line, &factor, sums, 0,
                       s.columns);
        factor = 1.0f;
    }
    if (end % s.PAIR)
        add_half<E, true>(probabilities + whole, s.values + whole * s.columns, factor, sums, s.columns);
}

// All of a row's values in a block, of which it does not see the first.
template <class E>
static void add_cut(const Scratch<E>& s, int64_t row, const float* probabilities, Seen seen, float factor) {
    int64_t line = seen.first / s.PAIR;
    if (seen.first % s.PAIR) {
        add_half<E, false>(probabilities + line, s.values + line * s.columns, factor, s.sums + row * s.columns, s.columns);
        factor = 1.0f;
        line++;
    }
    add_rest(s, row, probabilities, line, seen.end, factor);
}

CAESURA_INLINE void value_lines(const float* value, int64_t, F& low, F& high) {
    low = load(value), high = load(value + LANES);
}
CAESURA_INLINE void value_lines(const bf16* value, int64_t size, F& low, F& high) {
    interleave(value, value + size, low, high);
}

// C vectors of columns of R rows take in the block's values from where they lie; meanwhile the same part of `later_keys` is
// fetched. All rows see the block from `first` on.
template <class E, int R, int C>
static void add_values(const Scratch<E>& s, const Block<E>& block, int64_t value_row, int64_t first, const float* factors,
                       int64_t row, int64_t column) {
    F sum[R][C];
    float* sums = s.sums + row * s.columns + column;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = mul(load(sums + r * s.columns + c * LANES), set1(factors[r]));
    const float* weights = s.probabilities + first / s.PAIR;
    for (int64_t page = first / PAGE; page * PAGE < block.count; page++) {
        const int64_t count = smaller(PAGE, block.count - page * PAGE), seen = first - page * PAGE;
        const int64_t begin = seen > 0 ? seen / s.PAIR * s.PAIR : 0;
        const E* value = block.values[page] + column + begin * value_row;
        const char* ahead = (const char*)(block.later_keys[page] + column * PAGE);
        for (int64_t i = begin; i < count; i += s.PAIR, value += s.PAIR * value_row, ahead += C * LANES * 4, weights++) {
            F line[C];
            for (int c = 0; c < C; c += 2) value_lines(value + c * LANES, value_row, line[c], line[c + 1]);
            if (i < seen)
                for (int c = 0; c < C; c++) line[c] = keep_high(line[c]);
            if (count - i < s.PAIR)
                for (int c = 0; c < C; c++) line[c] = keep_low(line[c]);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const F weight = set1_word(weights + r * (BLOCK / s.PAIR));
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    sum[r][c] = dot(sum[r][c], weight, line[c], E());
                    if (r == 0 && c % (16 / LANES) == 0) prefetch(ahead + c * LANES * 4, 64);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * s.columns + c * LANES, sum[r][c]);
}

// The same for the columns from `column` on.
template <class E, int R, int C>
static void add_all_values(const Attention& a, const Scratch<E>& s, const Block<E>& block, int64_t first,
                           const float* factors, int64_t row, int64_t column) {
    for (; column + C * LANES <= a.value_size; column += C * LANES)
        add_values<E, R, C>(s, block, a.value_row, first, factors, row, column);
    if constexpr (C > 2)
        if (column < a.value_size) add_all_values<E, R, C / 2>(a, s, block, first, factors, row, column);
}

// R rows from `row` on take in a block; the first of them stands `visible` - 1 positions behind its beginning. DIRECT: values
// are not packed, and all rows are one token's.
template <class E, int R, bool DIRECT>
static void tile(const Attention& a, const Scratch<E>& s, const Block<E>& block, int64_t row, int64_t visible) {
    Seen seen[R];
    for (int r = 0; r < R; r++) {
        const int64_t end = visible + (row + r) / a.group - row / a.group;
        seen[r] = {a.form.first(end - 1), end < 0 ? 0 : smaller(end, block.count)};
    }
    if (seen[R - 1].end == 0 || seen[0].first >= block.count) return;
    for (int64_t i = seen[0].first / PAGE * PAGE; i < seen[R - 1].end; i += PAGE)
        score_page<E, R, DIRECT>(s, s.queries + row * s.words, block.keys[i / PAGE], block.values[i / PAGE],
                                 s.scores + i);
    float factors[LANES];
    weigh_rows<E, R>(s, a.form, row, seen, factors);
    if constexpr (DIRECT)
        return add_all_values<E, R, R <= 2 ? 2 * TILE_VECTORS : TILE_VECTORS>(a, s, block, seen[0].first, factors, row, 0);
    if (seen[R - 1].first > 0) {
        for (int r = 0; r < R; r++)
            if (seen[r].first < seen[r].end)
                add_cut(s, row + r, s.probabilities + r * BLOCK / s.PAIR, seen[r], factors[r]);
        return;
    }
    const int64_t shared = seen[0].end / s.PAIR;
    multiply<E, R>(s.probabilities, BLOCK / s.PAIR, s.values, s.columns, shared, factors, s.sums + row * s.columns,
                   s.columns, s.columns);
    for (int r = 0; r < R; r++)
        if (seen[r].end > shared * s.PAIR)
            add_rest(s, row + r, s.probabilities + r * BLOCK / s.PAIR, shared, seen[r].end, 1.0f);
}

template <class E, int R, bool DIRECT>
static void tile_of(int64_t rows, const Attention& a, const Scratch<E>& s, const Block<E>& block, int64_t row,
                    int64_t visible) {
    if (rows == R) return tile<E, R, DIRECT>(a, s, block, row, visible);
    if constexpr (R > 1) tile_of<E, R - 1, DIRECT>(rows, a, s, block, row, visible);
}

// All rows of a task take in a block, in tiles of nearly equal size.
template <class E, bool DIRECT>
static void all_tiles(const Attention& a, const Scratch<E>& s, const Block<E>& block, const Task& t, int64_t begin) {
    constexpr int R = TILE_ROWS<E>;
    const int64_t rows = t.tokens * a.group, tiles = (rows + R - 1) / R;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t row = rows * i / tiles, end = rows * (i + 1) / tiles;
        tile_of<E, R, DIRECT>(end - row, a, s, block, row, t.position + row / a.group + 1 - begin);
    }
}

template <class E>
static void start(const Attention& a, const Task& t, int64_t head, const Scratch<E>& s) {
    const int64_t rows = t.tokens * a.group;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = t.token + row / a.group, query_head = head * a.group + row % a.group;
        const E* q = (const E*)a.q + token * a.q_token + query_head * a.q_head;
        float* query = s.queries + row * s.words;
        std::memset(query, 0, s.words * sizeof(float));
        std::memcpy(query, q, a.size * sizeof(E));
        s.largest[row] = a.form.sinks ? to_float(((const E*)a.form.sinks)[query_head]) : -INFINITY;
        s.weights[row] = s.largest[row] == -INFINITY ? 0.0f : 1.0f;
    }
    std::memset(s.sums, 0, rows * s.columns * sizeof(float));
}

template <class E>
static void finish(const Attention& a, const Task& t, int64_t head, const Scratch<E>& s) {
    for (int64_t row = 0; row < t.tokens * a.group; row++) {
        E* out = (E*)a.out + (t.token + row / a.group) * a.out_token + (head * a.group + row % a.group) * a.value_size;
        const F inverse = set1(1.0f / s.weights[row]);
        const float* sums = s.sums + row * s.columns;
        for (int64_t c = 0; c < a.value_size; c += LANES) {
            const F mean = mul(load(sums + c), inverse);
            if (a.value_size - c >= LANES) {
                store(out + c, mean);
            } else {
                store(out + c, mean, a.value_size - c);
            }
        }
    }
}

// One task; `next` is what this thread does afterwards. A single token's values are packed only if several tiles would
// have to put the same ones together.
template <class E>
static void attend(const Attention& a, const HeadTask& t, const HeadTask& next, float* scratch) {
    const bool direct = t.task.tokens == 1 && a.group <= 2 * TILE_ROWS<E> && a.size % 32 == 0 && a.value_size % 32 == 0;
    const Scratch<E> s(scratch, a.size, a.value_size, t.task.tokens * a.group);
    start(a, t.task, t.head, s);
    for (int64_t begin = Block<E>::begin_of(a, t.task); begin < t.task.end(); begin += BLOCK) {
        Block<E> block(a, t, next, begin);
        if (direct) {
            all_tiles<E, true>(a, s, block, t.task, begin);
            continue;
        }
        if (a.size * sizeof(E) != s.words * sizeof(float)) copy_keys(block, a.size, s);
        pack_values(a, block, s);
        all_tiles<E, false>(a, s, block, t.task, begin);
    }
    finish(a, t.task, t.head, s);
}

}  // namespace CAESURA_ISA

#endif
