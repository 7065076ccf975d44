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
// multiplies and adds. fp16 becomes float when it is loaded, or when it is packed.
//
//     q K^T    lanes are words. A query meets a key as both lie in memory; sixteen results are then summed over their lanes
//              at once, by fold() and join().
//     P V      lanes are columns. A word of P meets two positions side by side: a block is packed so for a prefill, whose
//              rows share it; a decode step puts them together in registers. (Of floats a word meets one position.)
//
// With AMX both products of bfloat16 are those of attention_amx.h, of decode steps, too.
//
// Requests with the same first pages, such as samples of one prompt, attend to these together: their rows are those of one task
// there, and K and V are read once for all.
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
// - bfloat16: weights P are rounded before they meet V, and l is the sum of the rounded ones; sums are float. fp16: the result is
//   that of the same numbers as float, rounded once.
#ifndef CAESURA_ISA

#include "operations.h"

#include <algorithm>
#include <type_traits>

using namespace caesura;

namespace {

constexpr int64_t PAGE = 16, BLOCK = 64;
constexpr int64_t MAX_TILE = 16;  // rows computed together, at most

// A task for one kv head, whose page i of positions lies at (pages[i] * heads + stored) * PAGE, in tokens.
struct HeadTask {
    const Task& task;
    int64_t head, heads, stored;
    const int32_t* pages;

    HeadTask(const Attention& a, const Task& task, int64_t head)
        : task(task), head(head), heads(a.kv_heads / a.parts), stored(head / a.parts), pages(a.pages + task.row * a.pages_row) {}

    int64_t page_of(int64_t position) const { return (pages[position / PAGE] * heads + stored) * PAGE; }
};

// A word as K and V hold it.
template <class E>
using Word = std::conditional_t<std::is_same_v<E, fp16>, fp16, float>;

// One thread's memory, in floats; every part starts at a cache line. E: what products compute with.
template <class E>
struct Scratch {
    static constexpr int64_t PAIR = 4 / sizeof(E);
    int64_t words, columns;  // of a query or key, of a value; padded
    float *keys, *values, *queries, *turned, *sums, *kept, *largest, *weights, *scores, *probabilities, *end;

    Scratch(float* base, int64_t size, int64_t value_size, int64_t rows)
        : words(round_up((size + PAIR - 1) / PAIR, 16)), columns(round_up(value_size, 16)), end(base) {
        keys = take(words * BLOCK);
        values = take(BLOCK / PAIR * columns);
        queries = take(round_up(rows, MAX_TILE) * words);
        turned = take(words * BLOCK);
        sums = take(round_up(rows, MAX_TILE) * columns);
        kept = take(MAX_TILE * columns);
        largest = take(rows);
        weights = take(rows);
        scores = take(MAX_TILE * BLOCK);
        probabilities = take(MAX_TILE * BLOCK / PAIR);
    }

    // That of the rows from `row` on.
    Scratch from(int64_t row) const {
        Scratch part = *this;
        part.queries += row * words, part.sums += row * columns, part.largest += row, part.weights += row;
        return part;
    }

   private:
    float* take(int64_t floats) {
        float* part = end;
        end += round_up(floats, 16);
        return part;
    }
};

template <class E>
using ScratchOf = Scratch<Computed<E>>;

}  // namespace

#define CAESURA_FILE "attention.cpp"
#include "each_isa.h"
#if defined(__x86_64__)
#include "attention_amx.h"
#endif

namespace {

// Every task for every kv head. A thread knows its next before it begins, so that it can fetch what that one needs.
template <class E>
void all_tasks(const Attention& a, Team& team) {
    float* mine = a.scratch + team.thread * a.thread_floats;
    const auto of = [&](int64_t task) { return HeadTask(a, a.tasks[task / a.kv_heads], task % a.kv_heads); };
#if defined(__x86_64__)
    amx::Tiles tiles;
#endif
    team.each(a.num_tasks * a.kv_heads, [&](int64_t task, int64_t next) {
        if (a.tasks[task / a.kv_heads].count == 0) return;
#if defined(__x86_64__)
        if constexpr (std::is_same_v<E, bf16>)
            if (caesura::active_isa == AMX) return amx::attend(a, of(task), of(next < 0 ? task : next), mine, tiles);
#endif
        CAESURA_DISPATCH(attend<E>(a, of(task), of(next < 0 ? task : next), mine));
    });
}

}  // namespace

#define CAESURA_ATTENTION(NAME, E)                                                                                     \
    void caesura::attention(const Attention& a, Team& team, E) { all_tasks<E>(a, team); }                              \
    /* Floats of scratch that each thread needs, 64-byte aligned; `rows`: the largest tokens * group of a task. */     \
    CAESURA_API int64_t caesura_attention_scratch_##NAME(int64_t size, int64_t value_size, int64_t rows) {             \
        return ScratchOf<E>(nullptr, size, value_size, rows).end - (float*)nullptr;                                    \
    }                                                                                                                  \
    CAESURA_API void caesura_attention_##NAME(                                                                         \
        const void* q, int64_t q_token, int64_t q_head, const void* keys, const void* values, int64_t kv_heads,        \
        int64_t group, int64_t size, int64_t value_size, int64_t parts, int64_t value_row, const int32_t* pages,       \
        int64_t pages_row, const int64_t* tasks, int64_t num_tasks, int64_t window, float scale, float softcap,        \
        const void* sinks, void* out, int64_t out_token, float* scratch, int64_t thread_floats, int threads) {         \
        const Form form = {window, scale, softcap, sinks};                                                             \
        const Attention a = {q, q_token, q_head, keys, values, kv_heads, group, size, value_size, parts, value_row,    \
                             pages, pages_row, (const Task*)tasks, num_tasks, form, out, out_token, scratch,           \
                             thread_floats};                                                                           \
        run_team(threads, num_tasks * kv_heads > 1, [&](Team& team) { attention(a, team, E()); });                     \
    }
CAESURA_EACH_TYPE(CAESURA_ATTENTION)

#else

namespace CAESURA_ISA {

// Words as dot() takes them.
template <class E>
using Ready = decltype(ready(zero(), Computed<E>()));

CAESURA_INLINE F load_word(const float* p) { return load_words(p); }
CAESURA_INLINE F load_word(const fp16* p) { return load(p); }

#include "word_tiles.h"
#include "attention_pages.h"
#include "attention_scores.h"
#include "attention_values.h"

// R rows from `row` on take in a block; the first `each` rows stand `visible` - 1 positions behind its beginning, as many others
// one further on. DIRECT: values are not packed, and all rows stand at one position.
template <class E, int R, bool DIRECT>
static void tile(const Attention& a, const ScratchOf<E>& s, const Block<E>& block, int64_t row, int64_t visible, int64_t each) {
    Seen seen[R];
    for (int r = 0; r < R; r++) {
        const int64_t end = visible + (DIRECT ? 0 : (row + r) / each);
        seen[r] = {a.form.first(end - 1), end < 0 ? 0 : smaller(end, block.count)};
    }
    if (seen[R - 1].end == 0 || seen[0].first >= block.count) return;
    for (int64_t i = seen[0].first / PAGE * PAGE; i < seen[R - 1].end; i += PAGE)
        score_page<E, R, DIRECT>(s, s.queries + row * s.words, a.form, block.keys[i / PAGE], block.values[i / PAGE],
                                 s.scores + i);
    float factors[LANES];
    weigh_rows<E>(s, s.scores, row, R, seen, factors);
    constexpr int VECTORS = TILE_VECTORS * (R == 1 ? 4 : R == 2 ? 2 : 1);
    if constexpr (DIRECT) return add_all_values<E, R, VECTORS>(a, s, block, seen[0].first, factors, row, 0);
    if (seen[R - 1].first > 0) {
        for (int r = 0; r < R; r++)
            if (seen[r].first < seen[r].end)
                add_cut(s, row + r, s.probabilities + r * BLOCK / s.PAIR, seen[r], factors[r]);
        return;
    }
    const int64_t shared = seen[0].end / s.PAIR;
    multiply<Computed<E>, R>(s.probabilities, BLOCK / s.PAIR, s.values, s.columns, shared, factors, s.sums + row * s.columns,
                   s.columns, s.columns);
    for (int r = 0; r < R; r++)
        if (seen[r].end > shared * s.PAIR)
            add_rest(s, row + r, s.probabilities + r * BLOCK / s.PAIR, shared, seen[r].end, 1.0f);
}

template <class E, int R, bool DIRECT>
static void tile_of(int64_t rows, const Attention& a, const ScratchOf<E>& s, const Block<E>& block, int64_t row,
                    int64_t visible, int64_t each) {
    if (rows == R) return tile<E, R, DIRECT>(a, s, block, row, visible, each);
    if constexpr (R > 1) tile_of<E, R - 1, DIRECT>(rows, a, s, block, row, visible, each);
}

// `tokens` times `each` rows take in a block, in tiles of nearly equal size.
template <class E, bool DIRECT>
static void all_tiles(const Attention& a, const ScratchOf<E>& s, const Block<E>& block, int64_t tokens, int64_t each, int64_t visible) {
    constexpr int R = TILE_ROWS<E>;
    const int64_t rows = tokens * each, tiles = (rows + R - 1) / R;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t row = rows * i / tiles, end = rows * (i + 1) / tiles;
        tile_of<E, R, DIRECT>(end - row, a, s, block, row, visible, each);
    }
}

template <class E>
static void start(const Attention& a, const Task& t, int64_t head, const ScratchOf<E>& s) {
    const int64_t rows = t.tokens * a.group;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = t.token + row / a.group, query_head = head * a.group + row % a.group;
        const E* q = (const E*)a.q + token * a.q_token + query_head * a.q_head;
        float* query = s.queries + row * s.words;
        if (a.size != s.words * s.PAIR) std::memset(query, 0, s.words * sizeof(float));
        copy_words(q, a.size, query);
        s.largest[row] = a.form.sinks ? to_float(((const E*)a.form.sinks)[query_head]) : -INFINITY;
        s.weights[row] = s.largest[row] == -INFINITY ? 0.0f : 1.0f;
    }
    std::memset(s.sums, 0, rows * s.columns * sizeof(float));
}

template <class E>
static void finish(const Attention& a, const Task& t, int64_t head, const ScratchOf<E>& s) {
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

// Positions [begin, end) of a task with `each` rows to a token; `next` is what this thread does afterwards. A single token's values
// are packed only if several tiles would have to put the same ones together.
template <class E>
static void take_blocks(const Attention& a, const ScratchOf<E>& s, const HeadTask& t, const HeadTask& next, int64_t each, int64_t begin,
                        int64_t end) {
    const bool direct = t.task.tokens == 1 && each <= 2 * TILE_ROWS<E> && a.size % 32 == 0 && a.value_size % 32 == 0;
    for (; begin < end; begin += BLOCK) {
        Block<E> block(a, t, next, begin);
        const int64_t visible = t.task.position + 1 - begin;
        if (direct) {
            all_tiles<E, true>(a, s, block, 1, each, visible);
            continue;
        }
        if (a.size * sizeof(E) != s.words * sizeof(float)) copy_keys(block, a.size, s);
        pack_values(a, block, s);
        all_tiles<E, false>(a, s, block, t.task.tokens, each, visible);
    }
}

// A task, and those that attend together with it.
template <class E>
static void attend(const Attention& a, const HeadTask& t, const HeadTask& next, float* scratch) {
    const Task* tasks = &t.task;
    const int64_t count = t.task.count, shared = a.form.window ? 0 : t.task.shared;
    const ScratchOf<E> s(scratch, a.size, a.value_size, count * t.task.tokens * a.group);
    for (int64_t i = 0; i < count; i++) start<E>(a, tasks[i], t.head, s.from(i * a.group));
    take_blocks<E>(a, s, t, t, count * a.group, 0, shared);
    for (int64_t i = 0; i < count; i++) {
        const HeadTask one(a, tasks[i], t.head), after = i + 1 < count ? HeadTask(a, tasks[i + 1], t.head) : next;
        const int64_t begin = larger(shared, Block<E>::begin_of(a, tasks[i]));
        take_blocks<E>(a, s.from(i * a.group), one, after, a.group, begin, tasks[i].end());
        finish<E>(a, tasks[i], t.head, s.from(i * a.group));
    }
}

}  // namespace CAESURA_ISA

#endif
