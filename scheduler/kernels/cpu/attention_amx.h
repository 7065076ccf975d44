// The products of attention.cpp on AMX, in bfloat16: 16 rows of a task and a block of positions. Included by attention.cpp.
//
//     S^T = K q^T    tiles 0, 1: 16 keys x 16 rows, of two pages     tiles 4, 7: a page of keys, as it lies     tile 5: queries, turned
//     S = q K^T      tiles 0, 1: 16 rows x 16 keys, of two pages     tiles 4, 7: a page of keys, turned         tile 5: queries
//     O += P V       tiles 2, 3: 16 rows x 16 columns                tiles 4, 7: lines of values                tile 6: weights
//
// A score is the same sum either way. One token's rows fit a tile, and meet each key once: turning them takes less than turning keys.
//
// A decode step goes the same way, since a row must not show how many others there are; a group of fewer than 16 query heads has
// narrower tiles. A position that a row does not see has the weight zero, and so its values must be finite: they are zeros where no
// row of the task sees them, and a block with others that are not is taken apart. (Tiles flush subnormal sums, which alone could
// show that a row has met such a position.)
#include "tiles.h"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace amx {

using namespace avx512bf16;

constexpr int64_t ROWS = 16;

// Transposes words of 16 rows, `stride` words apart, to lines of `each`: the next one overwrites what is too much.
CAESURA_INLINE void turn(const float* from, int64_t stride, int64_t rows, float* to, int64_t each) {
    F x[16];
    for (int64_t r = 0; r < 16; r++) x[r] = r < rows ? load(from + r * stride) : zero();
    transpose(x);
    for (int64_t i = 0; i < 16; i++) store(to + i * each, x[i]);
}

// Queries of one token's rows, word after word.
static void turn_queries(const Scratch<bf16>& s, int64_t rows) {
    float* to = s.turned;
    for (int64_t word = 0; word < s.words; word += 16, to += 16 * rows) {
        const float* from = s.queries + word;
        if (rows == 1) {
            store(to, load(from));
        } else if (rows == 2) {
            const __m512i pairs = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            const F one = load(from), two = load(from + s.words);
            store(to, _mm512_permutex2var_ps(one, pairs, two));
            store(to + 16, _mm512_permutex2var_ps(one, _mm512_or_si512(pairs, _mm512_set1_epi32(8)), two));
        } else {
            turn(from, s.words, rows, to, rows);
        }
    }
}

// Keys of a block, a tile after the other.
static void turn_keys(const Block<bf16>& block, const Scratch<bf16>& s) {
    float* to = s.turned;
    for (int64_t page = 0; page * PAGE < block.count; page++)
        for (int64_t word = 0; word < s.words; word += 16, to += 256) turn((const float*)block.keys[page] + word, s.words, 16, to, 16);
}

// Values come in lines of 32 columns if there are as many, in the order in which unpacking two rows gives them.
static bool in_halves(const Attention& a) { return a.value_size % 32 == 0; }

CAESURA_INLINE void pack_halves(const bf16* value, int64_t next, int64_t n, float* line) {
    for (int64_t c = 0; c < n; c += 2 * LANES) {
        const __m512i x = _mm512_loadu_si512(value + c), y = _mm512_loadu_si512(value + next + c);
        store(line + c, (F)_mm512_unpacklo_epi16(x, y));
        store(line + c + LANES, (F)_mm512_unpackhi_epi16(x, y));
    }
}

// Puts the columns of `count` sums into their order.
static void sort_halves(float* sums, int64_t count) {
    const __m512i order = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), others = _mm512_add_epi64(order, _mm512_set1_epi64(4));
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const __m512d low = (__m512d)load(sums + i), high = (__m512d)load(sums + i + LANES);
        store(sums + i, (F)_mm512_permutex2var_pd(low, order, high));
        store(sums + i + LANES, (F)_mm512_permutex2var_pd(low, others, high));
    }
}

// Values of the positions that are seen, as lines; zeros around them, up to whole tiles.
CAESURA_INLINE void pack_seen(const Attention& a, const Block<bf16>& block, Seen seen, const Scratch<bf16>& s) {
    float* line = s.values;
    for (int64_t i = 0; i < round_up(block.count, 32); i += 2, line += s.columns) {
        const bool low = i >= seen.first && i < seen.end, high = i + 1 >= seen.first && i + 1 < seen.end;
        if (!low && !high) {
            std::memset(line, 0, s.columns * sizeof(float));
            continue;
        }
        const bf16* value = block.values[i / PAGE] + i % PAGE * a.value_row;
        in_halves(a) ? pack_halves(value, a.value_row, a.value_size, line) : pack_line(value, a.value_row, a.value_size, line);
        if (low && high) continue;
        for (int64_t c = 0; c < s.columns; c += LANES) store(line + c, low ? keep_low(load(line + c)) : keep_high(load(line + c)));
    }
}

static bool all_finite(const Scratch<bf16>& s, int64_t positions) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (int64_t i = 0; i < positions / 2 * s.columns; i += LANES)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)load(s.values + i), exponent), exponent);
    return found == 0;
}

// The scores of a page from a tile: 16 keys x `rows`.
CAESURA_INLINE void store_scores(const float* tile, int64_t rows, const Form& form, float* scores) {
    F x[16];
    if (rows == 1) {
        x[0] = load(tile);
    } else if (rows == 2) {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        x[0] = _mm512_permutex2var_ps(load(tile), even, load(tile + 16));
        x[1] = _mm512_permutex2var_ps(load(tile), _mm512_or_si512(even, _mm512_set1_epi32(1)), load(tile + 16));
    } else {
        for (int64_t key = 0; key < 16; key++) x[key] = load(tile + key * rows);
        transpose(x);
    }
    for (int64_t r = 0; r < rows; r++) store(scores + r * BLOCK, scaled(x[r], form));
}

// Scores of one token's `rows` rows, whose queries are turned, with the pages from `page` on. The block's values are asked for.
CAESURA_INLINE void score_token(const Scratch<bf16>& s, const Form& form, const Block<bf16>& block, int64_t rows, int64_t page) {
    alignas(64) float tiles[2][256 + 16];  // a row of fewer than 16 is read with what follows it
    for (; page * PAGE < block.count; page += 2) {
        const bool two = (page + 1) * PAGE < block.count;
        const int64_t second = two ? page + 1 : page;
        const float* keys[2] = {(const float*)block.keys[page], (const float*)block.keys[second]};
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t word = 0; word < s.words; word += 16) {
            _tile_loadd(5, s.turned + word * rows, 4 * rows);
            _tile_loadd(4, keys[0] + word, s.words * 4);
            _tile_loadd(7, keys[1] + word, s.words * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 7, 5);
            for (int64_t i = word; i < word + 16; i++) {
                fetch_first((const float*)block.values[page] + i * 16);
                fetch_first((const float*)block.values[second] + i * 16);
            }
        }
        _tile_stored(0, tiles[0], 4 * rows);
        _tile_stored(1, tiles[1], 4 * rows);
        for (int i = 0; i <= two; i++) store_scores(tiles[i], rows, form, s.scores + (page + i) * PAGE);
    }
}

// Scores of up to 16 rows with the pages [page, end), whose keys are turned.
CAESURA_INLINE void score_rows(const Scratch<bf16>& s, const Form& form, const float* queries, int64_t rows, int64_t page, int64_t end) {
    const int64_t first = page * PAGE;
    for (; page < end; page += 2) {
        const float *keys = s.turned + page * PAGE * s.words, *second = page + 1 < end ? keys + PAGE * s.words : keys;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t word = 0; word < s.words; word += 16) {
            _tile_loadd(5, queries + word, s.words * 4);
            _tile_loadd(4, keys + word * 16, 64);
            _tile_loadd(7, second + word * 16, 64);
            _tile_dpbf16ps(0, 5, 4);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, s.scores + page * PAGE, BLOCK * sizeof(float));
        if (page + 1 < end) _tile_stored(1, s.scores + (page + 1) * PAGE, BLOCK * sizeof(float));
    }
    for (int64_t r = 0; r < rows; r++)
        for (float* score = s.scores + r * BLOCK + first; score < s.scores + r * BLOCK + end * PAGE; score += LANES)
            store(score, scaled(load(score), form));
}

// sums[rows] = sums * factors + P V. FETCHING: the keys that come next are asked for.
template <bool FETCHING>
CAESURA_INLINE void add_block(const Attention& a, const Scratch<bf16>& s, const Block<bf16>& block, float* sums, const float* factors,
                              int64_t rows) {
    const int64_t stride = s.columns * sizeof(float), fetched = 32 * PAGE * a.size * sizeof(bf16) / s.columns;
    for (int64_t r = 0; r < rows; r++)
        if (factors[r] != 1.0f)
            for (float* sum = sums + r * s.columns; sum < sums + (r + 1) * s.columns; sum += LANES)
                store(sum, mul(load(sum), set1(factors[r])));
    for (int64_t c = 0; c < s.columns; c += 32) {
        const int64_t other = c + 16 < s.columns ? c + 16 : c;  // the same once more at an odd end
        _tile_loadd(2, sums + c, stride);
        _tile_loadd(3, sums + other, stride);
        for (int64_t page = 0; FETCHING && page * PAGE < block.count; page++)
            prefetch<false>((const char*)block.later_keys[page] + c / 32 * fetched, fetched);
        for (int64_t line = 0; 2 * line < block.count; line += 16) {
            const float* values = s.values + line * s.columns;
            _tile_loadd(6, s.probabilities + line, BLOCK * sizeof(bf16));
            _tile_loadd(4, values + c, stride);
            _tile_loadd(7, values + other, stride);
            _tile_dpbf16ps(2, 6, 4);
            _tile_dpbf16ps(3, 6, 7);
        }
        _tile_stored(2, sums + c, stride);
        _tile_stored(3, sums + other, stride);
    }
}

// Rows [row, row + 16) of a task, if there are as many, take in a block; `only`: those of one token, or of all (-1).
static void take_block(const Attention& a, const Scratch<bf16>& s, const Block<bf16>& block, const Task& t, int64_t each,
                       int64_t begin, int64_t row, int64_t only) {
    const int64_t rows = smaller(ROWS, t.tokens * each - row);
    Seen seen[ROWS] = {};
    int64_t first = BLOCK, end = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = (row + r) / each, visible = t.position + token + 1 - begin;
        if (visible <= 0 || (only >= 0 && token != only)) continue;
        seen[r] = {a.form.first(visible - 1), smaller(visible, block.count)};
        if (seen[r].first >= seen[r].end) continue;
        first = smaller(first, seen[r].first), end = larger(end, seen[r].end);
    }
    if (end == 0) return;
    score_rows(s, a.form, s.queries + row * s.words, rows, first / PAGE, (end + PAGE - 1) / PAGE);
    std::memset(s.probabilities, 0, ROWS * BLOCK * sizeof(bf16));
    float factors[LANES];
    weigh_rows<bf16>(s, s.scores, row, rows, seen, factors);
    add_block<false>(a, s, block, s.sums + row * s.columns, factors, rows);
}

// A block in which a row would meet what is not finite and what it does not see: token by token. The sums of others remain.
static void take_apart(const Attention& a, const Scratch<bf16>& s, const Block<bf16>& block, const Task& t, int64_t begin) {
    for (int64_t token = 0; token < t.tokens; token++) {
        const int64_t visible = t.position + token + 1 - begin, end = (token + 1) * a.group;
        if (visible <= 0) continue;
        pack_seen(a, block, {a.form.first(visible - 1), smaller(visible, block.count)}, s);
        for (int64_t row = token * a.group / ROWS * ROWS; row < end; row += ROWS) {
            const int64_t first = larger(row, token * a.group), last = smaller(row + ROWS, end);
            float* sums = s.sums + row * s.columns;
            std::memcpy(s.kept, sums, ROWS * s.columns * sizeof(float));
            take_block(a, s, block, t, a.group, begin, row, token);
            std::memcpy(sums, s.kept, (first - row) * s.columns * sizeof(float));
            std::memcpy(sums + (last - row) * s.columns, s.kept + (last - row) * s.columns,
                        (row + ROWS - last) * s.columns * sizeof(float));
        }
    }
}

// Positions [begin, end) of a task of one token with `rows` rows, for which the tiles are configured.
static void take_token(const Attention& a, const Scratch<bf16>& s, const HeadTask& t, const HeadTask& next, int64_t rows, int64_t begin,
                       int64_t end) {
    for (; begin < end; begin += BLOCK) {
        Block<bf16> block(a, t, next, begin);
        if (a.size * sizeof(bf16) != s.words * sizeof(float)) copy_keys(block, a.size, s);
        const Seen all = {larger(0, a.form.first(t.task.position) - begin), block.count};
        score_token(s, a.form, block, rows, all.first / PAGE);
        Seen seen[ROWS];
        std::fill(seen, seen + rows, all);
        if (all.first > 0 || all.end < BLOCK) std::memset(s.probabilities, 0, rows * BLOCK * sizeof(bf16));
        float factors[LANES];
        weigh_rows<bf16>(s, s.scores, 0, rows, seen, factors);
        pack_seen(a, block, all, s);
        add_block<true>(a, s, block, s.sums, factors, rows);
    }
}

// The same of a task with `each` rows to a token, 16 rows at a time.
static void take_rows(const Attention& a, const Scratch<bf16>& s, const HeadTask& t, const HeadTask& next, int64_t each, int64_t begin,
                      int64_t end) {
    const Task& task = t.task;
    for (; begin < end; begin += BLOCK) {
        Block<bf16> block(a, t, next, begin);
        if (a.size * sizeof(bf16) != s.words * sizeof(float)) copy_keys(block, a.size, s);
        for (int64_t page = 0; page * PAGE < block.count; page++) {
            prefetch<false>(block.later_keys[page], PAGE * a.size * sizeof(bf16));
            if (a.values != a.keys) prefetch<false>(block.later_values[page], PAGE * a.value_row * sizeof(bf16));
        }
        const int64_t first = a.form.first(task.position) - begin, last = a.form.first(task.end() - 1) - begin;
        const bool cut = task.tokens > 1 && (last > 0 || task.position + 1 < begin + block.count);
        turn_keys(block, s);
        pack_seen(a, block, {first, block.count}, s);
        if (cut && !all_finite(s, round_up(block.count, 32))) {
            take_apart(a, s, block, task, begin);
            continue;
        }
        for (int64_t row = 0; row < task.tokens * each; row += ROWS) take_block(a, s, block, task, each, begin, row, -1);
    }
}

// Positions [begin, end) of a task with `each` rows to a token.
static void take_blocks(const Attention& a, const Scratch<bf16>& s, const HeadTask& t, const HeadTask& next, int64_t each, int64_t begin,
                        int64_t end, Tiles& tiles) {
    if (begin >= end) return;
    const bool narrow = t.task.tokens == 1 && each <= ROWS;
    const int64_t rows = narrow ? each : ROWS;
    tiles.use(rows, [&](TileConfig& config) {
        config.row_bytes[0] = config.row_bytes[1] = config.row_bytes[5] = (uint16_t)(4 * rows);
        config.rows[2] = config.rows[3] = config.rows[6] = (uint8_t)rows;
    });
    if (narrow) turn_queries(s, each);
    narrow ? take_token(a, s, t, next, each, begin, end) : take_rows(a, s, t, next, each, begin, end);
}

static void attend(const Attention& a, const HeadTask& t, const HeadTask& next, float* scratch, Tiles& tiles) {
    const Task* tasks = &t.task;
    const int64_t count = t.task.count, shared = a.form.window ? 0 : t.task.shared;
    const Scratch<bf16> s(scratch, a.size, a.value_size, count * t.task.tokens * a.group);
    for (int64_t i = 0; i < count; i++) start<bf16>(a, tasks[i], t.head, s.from(i * a.group));
    take_blocks(a, s, t, t, count * a.group, 0, shared, tiles);
    for (int64_t i = 0; i < count; i++) {
        const HeadTask one(a, tasks[i], t.head), after = i + 1 < count ? HeadTask(a, tasks[i + 1], t.head) : next;
        const int64_t begin = larger(shared, Block<bf16>::begin_of(a, tasks[i]));
        take_blocks(a, s.from(i * a.group), one, after, a.group, begin, tasks[i].end(), tiles);
        if (in_halves(a)) sort_halves(s.from(i * a.group).sums, tasks[i].tokens * a.group * s.columns);
        finish<bf16>(a, tasks[i], t.head, s.from(i * a.group));
    }
}

}  // namespace amx
#pragma GCC pop_options
