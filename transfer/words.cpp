// Compares and overwrites tensors of any dtype by their bits: elements are words of 1, 2, 4 or 8 bytes.
//
// Positions are those of elements in the flattened tensor, int32 or, if `wide`, int64.
#include <cstdint>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define CAESURA_API extern "C" __attribute__((visibility("default")))

namespace {

struct Positions {
    void* at;
    bool wide;

    void set(int64_t index, int64_t position) const {
        if (wide)
            static_cast<int64_t*>(at)[index] = position;
        else
            static_cast<int32_t*>(at)[index] = static_cast<int32_t>(position);
    }
    int64_t get(int64_t index) const {
        return wide ? static_cast<const int64_t*>(at)[index] : static_cast<const int32_t*>(at)[index];
    }
};

// Writes the elements from `begin` to `end` that differ.
template <class Word>
inline int64_t scan(const Word* before, const Word* after, int64_t begin, int64_t end, int64_t first, int64_t count,
                    const Positions& positions, Word* old, Word* values) {
    for (int64_t i = begin; i < end; i++) {
        if (before[i] == after[i]) continue;
        positions.set(count, first + i);
        old[count] = before[i];
        values[count++] = after[i];
    }
    return count;
}

#ifdef __x86_64__
template <class Word>
__attribute__((target("avx2,bmi"))) int64_t changed_avx2(const Word* before, const Word* after, int64_t n, int64_t first,
                                                     const Positions& positions, Word* old, Word* values) {
    constexpr int64_t BLOCK = 128 / sizeof(Word), PART = 32 / sizeof(Word);
    int64_t count = 0, begin = 0;
    for (; begin + BLOCK <= n; begin += BLOCK) {
        __m256i difference[4];
        for (int part = 0; part < 4; part++) {
            const auto* a = reinterpret_cast<const __m256i*>(before + begin + part * PART);
            const auto* b = reinterpret_cast<const __m256i*>(after + begin + part * PART);
            _mm_prefetch(reinterpret_cast<const char*>(a) + 1024, _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(b) + 1024, _MM_HINT_T0);
            difference[part] = _mm256_xor_si256(_mm256_loadu_si256(a), _mm256_loadu_si256(b));
        }
        const __m256i any = _mm256_or_si256(_mm256_or_si256(difference[0], difference[1]),
                                            _mm256_or_si256(difference[2], difference[3]));
        if (_mm256_testz_si256(any, any)) continue;
        for (int part = 0; part < 4; part++) {
            const __m256i same = _mm256_cmpeq_epi8(difference[part], _mm256_setzero_si256());
            uint32_t bytes = ~static_cast<uint32_t>(_mm256_movemask_epi8(same));
            while (bytes) {  // a bit for each byte that differs
                const int64_t element = __builtin_ctz(bytes) / sizeof(Word), i = begin + part * PART + element;
                positions.set(count, first + i);
                old[count] = before[i];
                values[count++] = after[i];
                bytes &= ~static_cast<uint32_t>(((uint64_t{1} << sizeof(Word)) - 1) << (element * sizeof(Word)));
            }
        }
    }
    return scan(before, after, begin, n, first, count, positions, old, values);
}
#endif

template <class Word>
int64_t changed(const Word* before, const Word* after, int64_t n, int64_t first, const Positions& positions, Word* old,
                Word* values) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) return changed_avx2(before, after, n, first, positions, old, values);
#endif
    return scan(before, after, 0, n, first, 0, positions, old, values);
}

template <class Word>
void scatter(Word* target, const Positions& positions, const Word* values, Word* before, int64_t count) {
    constexpr int64_t AHEAD = 16;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(target + positions.get(i + AHEAD), 1);
        Word& place = target[positions.get(i)];
        if (before) before[i] = place;
        place = values[i];
    }
}

float value(uint32_t word) {
    float number;
    __builtin_memcpy(&number, &word, 4);
    return number;
}
float value(uint16_t word) { return value(uint32_t{word} << 16); }  // bfloat16

// Sixteen sums of each kind, so that they need no order.
template <class Word>
int64_t difference(const Word* before, const Word* after, int64_t n, double* sums) {
    constexpr int64_t BLOCK = 1024, PARTS = 16;
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = begin + BLOCK < n ? begin + BLOCK : n;
        float moved[PARTS] = {}, there[PARTS] = {};
        uint32_t changed[PARTS] = {};
        const auto take = [&](int64_t i, int64_t part) {
            const float old = value(before[i]), step = value(after[i]) - old;
            moved[part] += step * step;
            there[part] += old * old;
            changed[part] += before[i] != after[i];
        };
        int64_t i = begin;
        for (; i + PARTS <= end; i += PARTS)
            for (int64_t part = 0; part < PARTS; part++) take(i + part, part);
        for (; i < end; i++) take(i, 0);
        for (int64_t part = 0; part < PARTS; part++) {
            sums[0] += moved[part];
            sums[1] += there[part];
            count += changed[part];
        }
    }
    return count;
}

}  // namespace

// Rises, with _ABI in words.py, whenever the arguments of a function change.
CAESURA_API int caesura_words_abi() { return 5; }

// Writes position (from `first` on), old and new value of each of n elements that differ, ascending; returns their number.
CAESURA_API int64_t caesura_words_changed(const void* before, const void* after, int64_t n, int width, int64_t first,
                                          void* positions, int wide, void* old, void* values) {
    const Positions at{positions, wide != 0};
#define CAESURA_CHANGED(WORD)                                                                                    \
    return changed(static_cast<const WORD*>(before), static_cast<const WORD*>(after), n, first, at,              \
                   static_cast<WORD*>(old), static_cast<WORD*>(values))
    switch (width) {
        case 1: CAESURA_CHANGED(uint8_t);
        case 2: CAESURA_CHANGED(uint16_t);
        case 4: CAESURA_CHANGED(uint32_t);
        default: CAESURA_CHANGED(uint64_t);
    }
}

// Overwrites elements of `target`, after copying what was there to `before` if that is not null.
CAESURA_API void caesura_words_scatter(void* target, void* positions, int wide, const void* values, void* before,
                                       int64_t count, int width) {
    const Positions at{positions, wide != 0};
#define CAESURA_SCATTER(WORD)                                                                                     \
    return scatter(static_cast<WORD*>(target), at, static_cast<const WORD*>(values), static_cast<WORD*>(before), count)
    switch (width) {
        case 1: CAESURA_SCATTER(uint8_t);
        case 2: CAESURA_SCATTER(uint16_t);
        case 4: CAESURA_SCATTER(uint32_t);
        default: CAESURA_SCATTER(uint64_t);
    }
}

// Returns how many of n values differ; adds the squares of their changes, and of the values before, to `sums`.
CAESURA_API int64_t caesura_words_difference(const void* before, const void* after, int64_t n, int width, double* sums) {
    if (width == 2) return difference(static_cast<const uint16_t*>(before), static_cast<const uint16_t*>(after), n, sums);
    return difference(static_cast<const uint32_t*>(before), static_cast<const uint32_t*>(after), n, sums);
}
