// Vectors of 8 floats; the same names as simd_avx512.h, which describes them.

using F = __m256;
constexpr int LANES = 8;
constexpr bool PAIRS = false;
struct Two {
    F first, second;
};

CAESURA_INLINE F zero() { return _mm256_setzero_ps(); }
CAESURA_INLINE F set1(float x) { return _mm256_set1_ps(x); }
CAESURA_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
CAESURA_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
CAESURA_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
CAESURA_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
CAESURA_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
CAESURA_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
CAESURA_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
CAESURA_INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
CAESURA_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
CAESURA_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }

CAESURA_INLINE float reduce_add(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
CAESURA_INLINE float reduce_max(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

CAESURA_INLINE __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
CAESURA_INLINE F load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
CAESURA_INLINE void store(float* p, F x, int64_t n) { _mm256_maskstore_ps(p, first(n), x); }

CAESURA_INLINE F widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
CAESURA_INLINE F load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
CAESURA_INLINE F load(const bf16* p, int64_t n) {
    bf16 buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(bf16));
    return load(buffer);
}

CAESURA_INLINE __m256i narrowed(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, nan);
}
CAESURA_INLINE __m128i narrow(F x) {
    const __m256i high = _mm256_srli_epi32(narrowed(x), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
CAESURA_INLINE void store(bf16* p, F x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
CAESURA_INLINE void store(bf16* p, F x, int64_t n) {
    bf16 buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(bf16));
}

CAESURA_INLINE F load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
CAESURA_INLINE F load(const fp16* p, int64_t n) {
    fp16 buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(fp16));
    return load(buffer);
}
CAESURA_INLINE __m128i narrow_to_fp16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
CAESURA_INLINE void store(fp16* p, F x) { _mm_storeu_si128((__m128i*)p, narrow_to_fp16(x)); }
CAESURA_INLINE void store(fp16* p, F x, int64_t n) {
    fp16 buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(fp16));
}

CAESURA_INLINE F rounded(F x, float) { return x; }
CAESURA_INLINE F rounded(F x, bf16) { return (F)_mm256_and_si256(narrowed(x), _mm256_set1_epi32((int)0xffff0000)); }
CAESURA_INLINE F rounded(F x, fp16) { return _mm256_cvtph_ps(narrow_to_fp16(x)); }

CAESURA_INLINE F load_words(const void* p) { return _mm256_loadu_ps((const float*)p); }
CAESURA_INLINE F set1_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm256_castsi256_ps(_mm256_set1_epi32(word));
}

struct Halves {
    F low, high;
};
CAESURA_INLINE F ready(F words, float) { return words; }
CAESURA_INLINE Halves ready(F words, bf16) {
    const __m256i x = _mm256_castps_si256(words), high = _mm256_set1_epi32((int)0xffff0000);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_and_si256(x, high))};
}

CAESURA_INLINE F dot(F sum, F a, F b, float) { return fma(a, b, sum); }
CAESURA_INLINE F dot(F sum, Halves a, Halves b, bf16) { return fma(a.low, b.low, fma(a.high, b.high, sum)); }
CAESURA_INLINE F dot(F sum, F a, F b, bf16) { return dot(sum, ready(a, bf16()), ready(b, bf16()), bf16()); }

// Together, as GCC would load words early, and then sums would not fit into the registers.
CAESURA_INLINE Two dot(Two sum, const float* word, Two words, float) {
    F value;
    asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+x"(sum.first), "+x"(sum.second), "=&x"(value)
        : "m"(*word), "x"(words.first), "x"(words.second));
    return sum;
}

using Ints = int32_t __attribute__((vector_size(32)));
struct Bytes {
    __m256i size, sign;
};
CAESURA_INLINE Bytes to_bytes(F words) { return {_mm256_abs_epi8((__m256i)words), (__m256i)words}; }
CAESURA_INLINE Ints dot(Ints sum, F x, Bytes w) {
    const __m256i turned = _mm256_sign_epi8((__m256i)x, w.sign);
    return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w.size, turned), _mm256_set1_epi16(1));
}
CAESURA_INLINE int32_t start_of(const char*, int64_t) { return 0; }
CAESURA_INLINE Ints set1_ints(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
CAESURA_INLINE F to_floats(Ints x) { return _mm256_cvtepi32_ps((__m256i)x); }
CAESURA_INLINE F load_table(const int8_t* numbers) {
    return (F)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)numbers));
}
template <bool UPPER>
CAESURA_INLINE F from_codes(F words, F table) {
    const __m256i moved = UPPER ? _mm256_srli_epi16((__m256i)words, 4) : (__m256i)words;
    return (F)_mm256_shuffle_epi8((__m256i)table, _mm256_and_si256(moved, _mm256_set1_epi8(15)));
}
CAESURA_INLINE void store_bytes(char* p, F x) {
    const __m256i numbers = _mm256_cvtps_epi32(x);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(pairs, pairs));
}

CAESURA_INLINE void from_fp16(F words, F& low, F& high) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6,
                                           7, 10, 11, 14, 15);
    const __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)words, order), 0xd8);
    low = _mm256_cvtph_ps(_mm256_castsi256_si128(sorted));
    high = _mm256_cvtph_ps(_mm256_extracti128_si256(sorted, 1));
}

template <int K>
CAESURA_INLINE F from_fp8(F words) {
    const __m256i first = K == 3 ? (__m256i)words : _mm256_slli_epi32((__m256i)words, K == 3 ? 0 : 24 - 8 * K);
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(first, 4), _mm256_set1_epi32((int)0x87f00000));
    return mul(_mm256_castsi256_ps(bits), set1(0x1p120f));
}

CAESURA_INLINE __m256i nan_bytes(F words) {
    const __m256i magnitude = _mm256_set1_epi8(0x7f);
    return _mm256_cmpeq_epi8(_mm256_and_si256((__m256i)words, magnitude), magnitude);
}
CAESURA_INLINE bool has_nan(F words) { return _mm256_movemask_epi8(nan_bytes(words)) != 0; }
CAESURA_INLINE F poisoned(F x, F words) {
    const __m256i clean = _mm256_cmpeq_epi32(nan_bytes(words), _mm256_setzero_si256());
    return (F)_mm256_or_si256((__m256i)x, _mm256_xor_si256(clean, _mm256_set1_epi32(-1)));
}

CAESURA_INLINE F pairs(F low, F high) {
    const __m256i upper = _mm256_and_si256(narrowed(high), _mm256_set1_epi32((int)0xffff0000));
    return (F)_mm256_or_si256(_mm256_srli_epi32(narrowed(low), 16), upper);
}

CAESURA_INLINE F exp(F x) {
    const F tiny = _mm256_cmp_ps(x, set1(EXP_MIN), _CMP_LT_OQ);
    const F y = min(set1(EXP_MAX), x);
    const F n = _mm256_round_ps(mul(y, set1(LOG2_E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = fma(n, set1(-LN2_LOW), fma(n, set1(-LN2_HIGH), y));
    F p = set1(EXP_P[0]);
    for (int i = 1; i < 6; i++) p = fma(p, r, set1(EXP_P[i]));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(tiny, mul(p, _mm256_castsi256_ps(power)));
}

CAESURA_INLINE F tanh(F x) {
    const F size = _mm256_andnot_ps(set1(-0.0f), x), square = mul(x, x);
    F p = set1(TANH_P[0]);
    for (int i = 1; i < 5; i++) p = fma(p, square, set1(TANH_P[i]));
    const F small = fma(mul(p, square), x, x);
    const F large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
    const F sign = _mm256_and_ps(x, set1(-0.0f));
    return _mm256_blendv_ps(_mm256_or_ps(large, sign), small, _mm256_cmp_ps(size, set1(0.625f), _CMP_LT_OQ));
}

CAESURA_INLINE F keep_first(F x, int64_t n, F rest) {
    return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(first(n < LANES ? n : LANES)));
}

CAESURA_INLINE F keep_low(F words) { return _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff))); }
CAESURA_INLINE F keep_high(F words) {
    return _mm256_and_ps(words, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}
CAESURA_INLINE F swapped(F x) { return _mm256_permute_ps(x, 0xb1); }
CAESURA_INLINE void interleave(const bf16* first, const bf16* second, F& low, F& high) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)first), b = _mm256_loadu_si256((const __m256i*)second);
    const __m256i even = _mm256_unpacklo_epi16(a, b), odd = _mm256_unpackhi_epi16(a, b);
    low = (F)_mm256_permute2x128_si256(even, odd, 0x20);
    high = (F)_mm256_permute2x128_si256(even, odd, 0x31);
}

constexpr int FOLDS = 2;

CAESURA_INLINE F fold(const F (&x)[4]) {
    const F low = add(_mm256_blend_ps(x[0], x[1], 0xcc), _mm256_shuffle_ps(x[0], x[1], 0x4e));
    const F high = add(_mm256_blend_ps(x[2], x[3], 0xcc), _mm256_shuffle_ps(x[2], x[3], 0x4e));
    return add(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
}
CAESURA_INLINE F join(const F (&x)[2]) {
    return add(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
}

CAESURA_INLINE void transpose(F (&x)[8]) {
    F y[8];
    for (int i = 0; i < 8; i += 4) {
        const F a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
        const F c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm256_shuffle_ps(a, c, 0x44), y[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        y[i + 2] = _mm256_shuffle_ps(b, d, 0x44), y[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20), x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
    }
}

CAESURA_INLINE void stream(float* p, F x) { _mm256_stream_ps(p, x); }

CAESURA_INLINE F difference(F a, F b) { return _mm256_xor_ps(a, b); }
CAESURA_INLINE F either(F a, F b) { return _mm256_or_ps(a, b); }
CAESURA_INLINE bool any(F x) { return !_mm256_testz_si256((__m256i)x, (__m256i)x); }
CAESURA_INLINE uint32_t negative(F x) { return (uint32_t)_mm256_movemask_ps(x); }
