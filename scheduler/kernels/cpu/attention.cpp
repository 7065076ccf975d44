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
// Both products are one routine, out[rows, columns] += a[rows, k] * b[k, columns], whose k counts *words* of four bytes:
// a float, or two neighbouring bfloat16 values, which one instruction multiplies and adds. So a block is packed first:
//
//     keys    [head size / pair] [64 positions]        a page is transposed, word by word
//     values  [64 / pair] [head size]                  two positions side by side
//
// A decode step packs while it waits for memory, and a prefill shares the packed block among the rows of a task.
//
// Invariants:
// - A row's result depends on its query and on the K and V of its positions alone, to the last bit: every element is
//   one chain of additions over ascending words, blocks begin at multiples of 64, and what a row may not see is left
//   out instead of multiplied by zero. So neither the number of rows, nor chunks, pages or threads can show.
// - For that reason a request's positions are never divided among threads; kv heads and blocks of queries are.
// - What lies behind the last position of a request is never used, whatever it holds.
// - bfloat16: weights P are rounded before they meet V, and l is the sum of the rounded ones; sums are float.
#ifndef CAESURA_ISA

#include "common.h"

#include <omp.h>

namespace {

constexpr int64_t PAGE = 16, BLOCK = 64;
constexpr int64_t AHEAD = 8 << 10;  // bytes of K and V under way, between being asked for and being used
constexpr int MAX_TILE = 6;  // rows computed together, at most

struct Attention {
    const void* q;
    int64_t q_token, q_head;  // strides
    const void* keys;
    const void* values;
    int64_t kv_heads, group, size;
    const int32_t* pages;
    int64_t pages_row;  // stride
    float scale;
    void* out;
    int64_t out_token;  // stride
};

// `tokens` query tokens from number `token` of the step on, of the request in row `row` of the page table; the first of
// them stands at `position`.
struct Task {
    int64_t row, token, tokens, position;

    int64_t end() const { return position + tokens; }
};

struct HeadTask {
    Task task;
    int64_t head;
};

// One thread's memory, in floats; every part starts at a cache line.
template <class E>
struct Scratch {
    static constexpr int64_t PAIR = 4 / sizeof(E);
    int64_t words, columns;  // of a query or key, of a value
    float *keys, *values, *queries, *sums, *largest, *weights, *scores, *probabilities, *end;

    Scratch(float* base, int64_t size, int64_t rows)
        : words((size + PAIR - 1) / PAIR), columns(round_up(size, 16)), end(base) {
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
int64_t scratch_floats(int64_t size, int64_t rows) {
    return Scratch<E>(nullptr, size, rows).end - (float*)nullptr;
}

}  // namespace

#define CAESURA_FILE "attention.cpp"
#include "each_isa.h"

namespace {

// Every task for every kv head, taken one by one, because their lengths differ. A thread takes its next before it
// begins, so that it can fetch what that one needs.
template <class E>
void attention(const Attention& a, const Task* tasks, int64_t num_tasks, float* scratch, int64_t thread_floats,
               int threads) {
    const int64_t total = num_tasks * a.kv_heads;
    int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && total > 1)
    {
        float* mine = scratch + omp_get_thread_num() * thread_floats;
        int64_t now = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
        while (now < total) {
            const int64_t next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED), last = next < total ? next : now;
            const HeadTask task = {tasks[now / a.kv_heads], now % a.kv_heads};
            CAESURA_DISPATCH(attend<E>(a, task, {tasks[last / a.kv_heads], last % a.kv_heads}, mine));
            now = next;
        }
    }
}

}  // namespace

// Floats of scratch that each thread needs, 64-byte aligned; `rows`: the largest tokens * group of a task.
CAESURA_API int64_t caesura_attention_scratch_bf16(int64_t size, int64_t rows) {
    return scratch_floats<bf16>(size, rows);
}
CAESURA_API int64_t caesura_attention_scratch_f32(int64_t size, int64_t rows) {
    return scratch_floats<float>(size, rows);
}

#define CAESURA_ATTENTION(NAME, E)                                                                                     \
    CAESURA_API void NAME(const void* q, int64_t q_token, int64_t q_head, const void* keys, const void* values,        \
                          int64_t kv_heads, int64_t group, int64_t size, const int32_t* pages, int64_t pages_row,      \
                          const int64_t* tasks, int64_t num_tasks, float scale, void* out, int64_t out_token,          \
                          float* scratch, int64_t thread_floats, int threads) {                                        \
        const Attention a = {q, q_token, q_head, keys, values, kv_heads, group, size, pages, pages_row, scale, out,    \
                             out_token};                                                                               \
        attention<E>(a, (const Task*)tasks, num_tasks, scratch, thread_floats, threads);                               \
    }
CAESURA_ATTENTION(caesura_attention_bf16, bf16)
CAESURA_ATTENTION(caesura_attention_f32, float)

#else

namespace CAESURA_ISA {

// A tile's sums fill the registers: rows times vectors of columns.
template <class E>
constexpr int TILE_ROWS = LANES == 16 || sizeof(E) == 4 ? 6 : 4;
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;

// out[R, C vectors] = out * factor + a[R, k] * b[k, C vectors], in words; no `factors`: out = a * b.
template <class E, int R, int C>
static void multiply_tile(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t k, const float* factors,
                          float* out, int64_t out_row) {
    F sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            sum[r][c] = factors ? mul(load(out + r * out_row + c * LANES), set1(factors[r])) : zero();
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

// Where a position of the task's request lies, in elements; its page holds the 15 after it if it is the first.
static int64_t offset_of(const Attention& a, const HeadTask& t, int64_t position) {
    const int64_t page = a.pages[t.task.row * a.pages_row + position / PAGE];
    return ((page * a.kv_heads + t.head) * PAGE + position % PAGE) * a.size;
}

// Asked for ahead of its use, because the processor's own prefetchers stop at the end of a page; a few lines at a time,
// because only so many can be under way.
CAESURA_INLINE void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

// The page at `key` becomes 16 of the 64 columns of `packed`; `later` is the page to prefetch.
template <class E>
static void pack_page(const E* key, const E* later, int64_t size, float* packed) {
    const int64_t bytes = size * sizeof(E), line = LANES * 4;
    const char* ahead = (const char*)later;
    for (int64_t first = 0; first < PAGE; first += LANES, key += LANES * size, packed += LANES) {
        for (int64_t begin = 0; begin < bytes; begin += line) {
            const int64_t left = bytes - begin < line ? bytes - begin : line;
            prefetch(ahead, LANES * left);
            ahead += LANES * left;
            F words[LANES];
            for (int j = 0; j < LANES; j++) {
                const char* row = (const char*)(key + j * size) + begin;
                float padded[LANES] = {};
                if (left < line) std::memcpy(padded, row, left);
                words[j] = load_words(left < line ? (const char*)padded : row);
            }
            transpose(words);
            for (int64_t i = 0; i < (left + 3) / 4; i++) store(packed + (begin / 4 + i) * BLOCK, words[i]);
        }
    }
}

// A line of n columns: a position's values, or those of it and the next, side by side.
static void pack_line(const float* value, int64_t n, float* line) { std::memcpy(line, value, n * 4); }
static void pack_line(const bf16* value, int64_t n, float* line) {
    int64_t c = 0;
    for (; c + 2 * LANES <= n; c += 2 * LANES) interleave(value + c, value + n + c, line + c);
    if (c == n) return;
    bf16 rest[2][2 * LANES] = {};
    float words[2 * LANES];
    std::memcpy(rest[0], value + c, (n - c) * 2);
    std::memcpy(rest[1], value + n + c, (n - c) * 2);
    interleave(rest[0], rest[1], words);
    std::memcpy(line + c, words, (n - c) * 4);
}

// `count` positions at `value` become lines of `packed`; `later` is the page to prefetch. What comes beside an odd last
// position, and what is in the padding columns, is not used.
template <class E>
static void pack_values(const E* value, const E* later, int64_t size, int64_t count, float* packed, int64_t columns) {
    constexpr int64_t PAIR = 4 / sizeof(E);
    for (int64_t i = 0; i < PAGE; i += PAIR, value += PAIR * size, later += PAIR * size, packed += columns) {
        prefetch(later, size * 4);
        if (i < count) pack_line(value, size, packed);
    }
}

// Packs positions [begin, begin + count) and fetches what comes a few pages later, in this task or at the start of the
// next.
template <class E>
static void pack_block(const Attention& a, const HeadTask& t, const HeadTask& next, int64_t begin, int64_t count,
                       const Scratch<E>& s) {
    const E *keys = (const E*)a.keys, *values = (const E*)a.values;
    const int64_t end = round_up(t.task.end(), PAGE), pages_ahead = AHEAD / (2 * PAGE * a.size * (int64_t)sizeof(E));
    const int64_t distance = PAGE * (pages_ahead < 1 ? 1 : pages_ahead < 4 ? pages_ahead : 4);
    for (int64_t i = 0; i < count; i += PAGE) {
        const int64_t here = offset_of(a, t, begin + i), ahead = begin + i + distance;
        int64_t later = here;
        if (ahead < end) {
            later = offset_of(a, t, ahead);
        } else if (ahead - end < next.task.end()) {
            later = offset_of(a, next, ahead - end);
        }
        pack_page(keys + here, keys + later, a.size, s.keys + i);
        pack_values(values + here, values + later, a.size, count - i < PAGE ? count - i : PAGE,
                    s.values + i / Scratch<E>::PAIR * s.columns, s.columns);
    }
}

// The weights of one row's scores, of which it sees the first `count`; returns m - m', for the sums so far.
template <class E>
static float weigh(float* scores, int64_t count, int64_t columns, float scale, float& largest, float& weights,
                   E* probabilities) {
    const F lowest = set1(-INFINITY);
    F top = lowest;
    for (int64_t c = 0; c < columns; c += LANES) {
        // Overwritten, not added to: what lies there may be NaN.
        const F score = keep_first(mul(load(scores + c), set1(scale)), count - c, lowest);
        store(scores + c, score);
        top = max(score, top);
    }
    const float block_largest = reduce_max(top), before = largest;
    largest = block_largest > before ? block_largest : before;
    F total = zero();
    for (int64_t c = 0; c < columns; c += LANES) {
        store(probabilities + c, exp(sub(load(scores + c), set1(largest))));
        total = add(total, load(probabilities + c));
    }
    weights = reduce_add(total);
    return before - largest;
}

// The rest of a row's values: lines [line, count / pair) and, if the last line is only half seen, that half.
template <class E>
static void add_rest(const Scratch<E>& s, int64_t row, const float* probabilities, int64_t line, int64_t count) {
    const float one = 1.0f;
    const int64_t whole = count / s.PAIR;
    float* sums = s.sums + row * s.columns;
    if (line < whole)
        multiply<E, 1>(probabilities + line, 0, s.values + line * s.columns, s.columns, whole - line, &one, sums, 0,
                       s.columns);
    if (count % s.PAIR == 0) return;
    const F value = set1_word(probabilities + whole);
    for (int64_t c = 0; c < s.columns; c += LANES)
        store(sums + c, dot(load(sums + c), value, keep_low(load(s.values + whole * s.columns + c)), E()));
}

// R rows from `row` on take in the packed block; the first of them sees `visible` of its positions, were it longer.
template <class E, int R>
static void tile(const Attention& a, const Scratch<E>& s, int64_t row, int64_t visible, int64_t packed) {
    constexpr int64_t PAIR = Scratch<E>::PAIR;
    int64_t count[R];
    for (int r = 0; r < R; r++) {
        const int64_t sees = visible + (row + r) / a.group - row / a.group;
        count[r] = sees < 0 ? 0 : sees < packed ? sees : packed;
    }
    if (count[R - 1] == 0) return;
    const int64_t columns = round_up(count[R - 1], LANES), shared = count[0] / PAIR;
    multiply<E, R>(s.queries + row * s.words, s.words, s.keys, BLOCK, s.words, nullptr, s.scores, BLOCK, columns);
    float falls[LANES] = {}, factors[LANES], weights[R];
    E* probabilities = (E*)s.probabilities;
    for (int r = 0; r < R; r++)
        falls[r] = weigh(s.scores + r * BLOCK, count[r], columns, a.scale, s.largest[row + r], weights[r],
                         probabilities + r * BLOCK);
    store(factors, exp(load(falls)));
    for (int r = 0; r < R; r++) s.weights[row + r] = s.weights[row + r] * factors[r] + weights[r];
    multiply<E, R>(s.probabilities, BLOCK / PAIR, s.values, s.columns, shared, factors, s.sums + row * s.columns,
                   s.columns, s.columns);
    for (int r = 0; r < R; r++)
        if (count[r] > shared * PAIR)
            add_rest(s, row + r, s.probabilities + r * BLOCK / PAIR, shared, count[r]);
}

template <class E, int R>
static void tile_of(int64_t rows, const Attention& a, const Scratch<E>& s, int64_t row, int64_t visible,
                    int64_t packed) {
    if (rows >= R) return tile<E, R>(a, s, row, visible, packed);
    if constexpr (R > 1) tile_of<E, R - 1>(rows, a, s, row, visible, packed);
}

template <class E>
static void start(const Attention& a, const Task& t, int64_t head, const Scratch<E>& s) {
    const int64_t rows = t.tokens * a.group;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = t.token + row / a.group, query_head = head * a.group + row % a.group;
        const E* q = (const E*)a.q + token * a.q_token + query_head * a.q_head;
        float* query = s.queries + row * s.words;
        query[s.words - 1] = 0.0f;
        std::memcpy(query, q, a.size * sizeof(E));
        s.largest[row] = -INFINITY;
        s.weights[row] = 0.0f;
    }
    std::memset(s.sums, 0, rows * s.columns * sizeof(float));
}

template <class E>
static void finish(const Attention& a, const Task& t, int64_t head, const Scratch<E>& s) {
    for (int64_t row = 0; row < t.tokens * a.group; row++) {
        E* out = (E*)a.out + (t.token + row / a.group) * a.out_token + (head * a.group + row % a.group) * a.size;
        const F inverse = set1(1.0f / s.weights[row]);
        const float* sums = s.sums + row * s.columns;
        for (int64_t c = 0; c < a.size; c += LANES) {
            const F mean = mul(load(sums + c), inverse);
            if (a.size - c >= LANES) {
                store(out + c, mean);
            } else {
                store(out + c, mean, a.size - c);
            }
        }
    }
}

// One task; `next` is what this thread does afterwards.
template <class E>
static void attend(const Attention& a, const HeadTask& t, const HeadTask& next, float* scratch) {
    constexpr int R = TILE_ROWS<E>;
    const int64_t rows = t.task.tokens * a.group, end = t.task.end();
    const Scratch<E> s(scratch, a.size, rows);
    start(a, t.task, t.head, s);
    for (int64_t begin = 0; begin < end; begin += BLOCK) {
        const int64_t packed = end - begin < BLOCK ? end - begin : BLOCK;
        pack_block(a, t, next, begin, packed, s);
        for (int64_t row = 0; row < rows; row += R)
            tile_of<E, R>(rows - row, a, s, row, t.task.position + row / a.group + 1 - begin, packed);
    }
    finish(a, t.task, t.head, s);
}

}  // namespace CAESURA_ISA

#endif
