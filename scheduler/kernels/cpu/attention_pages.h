// A block of positions: where its pages lie, what is asked for meanwhile, and copies that several tiles share. Included by
// attention.cpp for each instruction set.

// A block of a task: its pages, and those that the thread needs afterwards, of this task or the next.
template <class E>
struct Block {
    int64_t count;  // positions
    const void* keys[BLOCK / PAGE];  // of E, or the copies of copy_keys()
    const E *values[BLOCK / PAGE], *later_keys[BLOCK / PAGE], *later_values[BLOCK / PAGE];

    Block(const Attention& a, const HeadTask& t, const HeadTask& next, int64_t begin)
        : count(smaller(t.task.end() - begin, BLOCK)) {
        const bool last = begin + BLOCK >= t.task.end();
        const HeadTask& after = last ? next : t;
        const int64_t ahead = last ? begin_of(a, next.task) : begin + BLOCK;
        for (int64_t i = 0; i * PAGE < count; i++) {
            const int64_t here = t.page_of(begin + i * PAGE);
            const int64_t later = ahead + i * PAGE < after.task.end() ? after.page_of(ahead + i * PAGE) : here;
            keys[i] = (const E*)a.keys + here * a.size, values[i] = (const E*)a.values + here * a.value_row;
            later_keys[i] = (const E*)a.keys + later * a.size, later_values[i] = (const E*)a.values + later * a.value_row;
        }
    }

    // The first block that any token of a task sees.
    static int64_t begin_of(const Attention& a, const Task& t) { return a.form.first(t.position) / BLOCK * BLOCK; }
};

// Asked for ahead of its use, because the processor's own prefetchers stop at the end of a page. Zen 4 has few lines under
// way to its first-level cache; AVX2 on Zen 3 gained nothing by the second level, and tiles lost by it
// (docs/contributing/experiments.md).
template <bool SECOND = PAIRS>
CAESURA_INLINE void prefetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) SECOND ? fetch_second((const char*)p + i) : fetch_first((const char*)p + i);
}

// A query or a key as words.
template <class E>
static void copy_words(const E* from, int64_t size, float* words) {
    if constexpr (std::is_same_v<Word<E>, float>) {
        std::memcpy(words, from, size * sizeof(E));
    } else {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(words + i, load(from + i));
        if (i < size) store(words + i, load(from + i, size - i), size - i);
    }
}

// Keys that are no whole number of lines, or no words yet, are copied, and filled up with zeros.
template <class E>
static void copy_keys(Block<E>& block, int64_t size, const ScratchOf<E>& s) {
    for (int64_t i = 0; i * PAGE < block.count; i++) {
        float* page = s.keys + i * PAGE * s.words;
        std::memset(page, 0, PAGE * s.words * sizeof(float));
        for (int64_t j = 0; j < PAGE; j++)
            copy_words((const E*)block.keys[i] + j * size, size, page + j * s.words);
        block.keys[i] = page;
    }
}

// A line of n columns: a position's values, or those of it and of that `next` elements further on, side by side.
static void pack_line(const float* value, int64_t, int64_t n, float* line) { std::memcpy(line, value, n * 4); }
static void pack_line(const fp16* value, int64_t, int64_t n, float* line) { copy_words(value, n, line); }
CAESURA_INLINE void pack_line(const bf16* value, int64_t next, int64_t n, float* line) {
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
static void pack_values(const Attention& a, const Block<E>& block, const ScratchOf<E>& s) {
    constexpr int64_t BYTES = s.PAIR * sizeof(E);
    float* line = s.values;
    for (int64_t i = 0; i < block.count; i += s.PAIR, line += s.columns) {
        const int64_t page = i / PAGE, offset = i % PAGE * a.value_row;
        prefetch(block.later_keys[page] + i % PAGE * a.size, a.size * BYTES);
        if (a.values != a.keys) prefetch(block.later_values[page] + offset, a.value_size * BYTES);
        pack_line(block.values[page] + offset, a.value_row, a.value_size, line);
    }
}
