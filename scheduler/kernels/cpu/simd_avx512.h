// Vectors of 16 floats. Included by common.h inside a namespace and a target region, hence no guard and no includes.
// A count `n` of 1 to LANES limits what is read and written: nothing beyond is touched, reads give 0 there.

using F = __m512;
constexpr int LANES = 16;
constexpr bool PAIRS = CAESURA_HAS_BF16;  // dot() of bf16 is one instruction
struct Two {
    F first, second;
};

CAESURA_INLINE F zero() { return _mm512_setzero_ps(); }
CAESURA_INLINE F set1(float x) { return _mm512_set1_ps(x); }
CAESURA_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
CAESURA_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
CAESURA_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
CAESURA_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
CAESURA_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
CAESURA_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
CAESURA_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
CAESURA_INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
// The second argument where either is NaN.
CAESURA_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
CAESURA_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
CAESURA_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
CAESURA_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

CAESURA_INLINE __mmask16 first(int64_t n) { return (__mmask16)((1u << n) - 1); }
CAESURA_INLINE F load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
CAESURA_INLINE void store(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

CAESURA_INLINE F widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
CAESURA_INLINE F load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
CAESURA_INLINE F load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }

// Rounds to the nearest bfloat16, ties to even, in the upper half of each lane. NaN stays NaN.
CAESURA_INLINE __m512i narrowed(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(nan, rounded, quiet);
}
CAESURA_INLINE __m256i narrow(F x) {
#if CAESURA_HAS_BF16
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(narrowed(x), 16));
#endif
}
CAESURA_INLINE void store(bf16* p, F x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
CAESURA_INLINE void store(bf16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

CAESURA_INLINE F load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
CAESURA_INLINE F load(const fp16* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
// Rounds to the nearest, ties to even.
CAESURA_INLINE __m256i narrow_to_fp16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
CAESURA_INLINE void store(fp16* p, F x) { _mm256_storeu_si256((__m256i*)p, narrow_to_fp16(x)); }
CAESURA_INLINE void store(fp16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow_to_fp16(x)); }

// x as the type of the last argument holds it.
CAESURA_INLINE F rounded(F x, float) { return x; }
CAESURA_INLINE F rounded(F x, bf16) {
#if CAESURA_HAS_BF16
    return widen(narrow(x));
#else
    return (F)_mm512_and_si512(narrowed(x), _mm512_set1_epi32((int)0xffff0000));
#endif
}
CAESURA_INLINE F rounded(F x, fp16) { return _mm512_cvtph_ps(narrow_to_fp16(x)); }

// Words: what a dot product takes at once. One float, or two neighbouring bfloat16 values. `p` is aligned to 2 bytes.
CAESURA_INLINE F load_words(const void* p) { return _mm512_loadu_ps(p); }
CAESURA_INLINE F set1_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm512_castsi512_ps(_mm512_set1_epi32(word));
}

// Words as dot() takes them: as they are or, without bf16 instructions, the numbers of each as floats.
struct Halves {
    F low, high;
};
CAESURA_INLINE F ready(F words, float) { return words; }
#if CAESURA_HAS_BF16
CAESURA_INLINE F ready(F words, bf16) { return words; }
#else
CAESURA_INLINE Halves ready(F words, bf16) {
    const __m512i x = _mm512_castps_si512(words), high = _mm512_set1_epi32((int)0xffff0000);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_and_si512(x, high))};
}
#endif

// sum + a * b, per word. The last argument says of which type.
CAESURA_INLINE F dot(F sum, F a, F b, float) { return fma(a, b, sum); }
#if CAESURA_HAS_BF16
CAESURA_INLINE F dot(F sum, F a, F b, bf16) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#else
CAESURA_INLINE F dot(F sum, Halves a, Halves b, bf16) { return fma(a.low, b.low, fma(a.high, b.high, sum)); }
CAESURA_INLINE F dot(F sum, F a, F b, bf16) { return dot(sum, ready(a, bf16()), ready(b, bf16()), bf16()); }
#endif

// Two sums at once, of a word of x that is in memory.
template <class E>
CAESURA_INLINE Two dot(Two sum, const float* word, Two words, E type) {
    const F value = set1_word(word);
    return {dot(sum.first, value, words.first, type), dot(sum.second, value, words.second, type)};
}

// Whole numbers: sums of products of four signed bytes each, above -128. Bytes are those of a weight, made ready for many
// rows: with VNNI 128 is added, as its instruction takes unsigned ones, and a sum starts from what subtracts that again.
using Ints = int32_t __attribute__((vector_size(64)));
#if CAESURA_HAS_BF16
using Bytes = __m512i;
CAESURA_INLINE Bytes to_bytes(F words) { return _mm512_xor_si512((__m512i)words, _mm512_set1_epi8(-128)); }
CAESURA_INLINE Ints dot(Ints sum, F x, Bytes w) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, w, (__m512i)x); }
CAESURA_INLINE int32_t start_of(const char* x, int64_t words) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < words; i += 16) {
        const __m512i numbers = _mm512_maskz_loadu_epi32(first(smaller(words - i, 16)), x + 4 * i);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), numbers);
    }
    return -_mm512_reduce_add_epi32(sum);
}
#else
struct Bytes {
    __m512i size;
    __mmask64 negative;
};
CAESURA_INLINE Bytes to_bytes(F words) { return {_mm512_abs_epi8((__m512i)words), _mm512_movepi8_mask((__m512i)words)}; }
CAESURA_INLINE Ints dot(Ints sum, F x, Bytes w) {
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, w.negative, _mm512_setzero_si512(), (__m512i)x);
    return sum + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(w.size, turned), _mm512_set1_epi16(1));
}
CAESURA_INLINE int32_t start_of(const char*, int64_t) { return 0; }
#endif
CAESURA_INLINE Ints set1_ints(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
CAESURA_INLINE F to_floats(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
// Numbers of the codes in the lower half of each byte, or in the upper one.
CAESURA_INLINE F load_table(const int8_t* numbers) {
    return (F)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)numbers));
}
template <bool UPPER>
CAESURA_INLINE F from_codes(F words, F table) {
    const __m512i moved = UPPER ? _mm512_srli_epi16((__m512i)words, 4) : (__m512i)words;
    return (F)_mm512_shuffle_epi8((__m512i)table, _mm512_and_si512(moved, _mm512_set1_epi8(15)));
}
// Rounds to the nearest integers, ties to even.
CAESURA_INLINE void store_bytes(char* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

// The two fp16 numbers of each word.
CAESURA_INLINE void from_fp16(F words, F& low, F& high) {
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18, 16,
                                           14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i sorted = _mm512_permutexvar_epi16(order, (__m512i)words);
    low = _mm512_cvtph_ps(_mm512_castsi512_si256(sorted));
    high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(sorted, 1));
}

// Byte K of each word, as float8_e4m3fn has it: sign, exponent and mantissa move to their places in a float, whose exponent is then
// 120 too low, also that of numbers which are subnormal. NaN becomes 480: see has_nan().
template <int K>
CAESURA_INLINE F from_fp8(F words) {
    const __m512i first = K == 3 ? (__m512i)words : _mm512_slli_epi32((__m512i)words, K == 3 ? 0 : 24 - 8 * K);
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(first, 4), _mm512_set1_epi32((int)0x87f00000));
    return mul(_mm512_castsi512_ps(bits), set1(0x1p120f));
}

// Returns true if a byte of fp8 words is NaN; poisoned() makes the lanes of such words NaN.
CAESURA_INLINE __mmask64 nan_bytes(F words) {
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512((__m512i)words, magnitude), magnitude);
}
CAESURA_INLINE bool has_nan(F words) { return nan_bytes(words) != 0; }
CAESURA_INLINE F poisoned(F x, F words) {
    const __m512i bytes = _mm512_movm_epi8(nan_bytes(words)), ones = _mm512_set1_epi32(-1);
    return (F)_mm512_mask_blend_epi32(_mm512_test_epi32_mask(bytes, bytes), (__m512i)x, ones);
}

// Words of pairs (low, high), each rounded to bfloat16.
CAESURA_INLINE F pairs(F low, F high) {
#if CAESURA_HAS_BF16
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (F)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    const __m512i upper = _mm512_and_si512(narrowed(high), _mm512_set1_epi32((int)0xffff0000));
    return (F)_mm512_or_si512(_mm512_srli_epi32(narrowed(low), 16), upper);
#endif
}

// Within 2 ulp up to EXP_MAX; 0 below EXP_MIN and for -inf; NaN stays NaN.
CAESURA_INLINE F exp(F x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, set1(EXP_MIN), _CMP_LT_OQ);
    const F y = min(set1(EXP_MAX), x);
    const F n = _mm512_roundscale_ps(mul(y, set1(LOG2_E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = fma(n, set1(-LN2_LOW), fma(n, set1(-LN2_HIGH), y));
    F p = set1(EXP_P[0]);
    for (int i = 1; i < 6; i++) p = fma(p, r, set1(EXP_P[i]));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return _mm512_mask_blend_ps(tiny, _mm512_scalef_ps(p, n), zero());
}

// Within 3 ulp (S. Moshier's Cephes library, tanhf: a polynomial below 0.625, by exp() above). NaN stays NaN.
CAESURA_INLINE F tanh(F x) {
    const F size = _mm512_abs_ps(x), square = mul(x, x);
    F p = set1(TANH_P[0]);
    for (int i = 1; i < 5; i++) p = fma(p, square, set1(TANH_P[i]));
    const F small = fma(mul(p, square), x, x);
    const F large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
    const F sign = _mm512_and_ps(x, set1(-0.0f));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(size, set1(0.625f), _CMP_LT_OQ), _mm512_or_ps(large, sign), small);
}

// The first n lanes of `x`, then those of `rest`; any n.
CAESURA_INLINE F keep_first(F x, int64_t n, F rest) {
    return _mm512_mask_blend_ps(n >= LANES ? 0xffff : n <= 0 ? 0 : first(n), rest, x);
}

// Words of pairs: (low, 0), and (0, high).
CAESURA_INLINE F keep_low(F words) { return _mm512_and_ps(words, _mm512_castsi512_ps(_mm512_set1_epi32(0xffff))); }
CAESURA_INLINE F keep_high(F words) {
    return _mm512_and_ps(words, _mm512_castsi512_ps(_mm512_set1_epi32((int)0xffff0000)));
}
// Each with its neighbour.
CAESURA_INLINE F swapped(F x) { return _mm512_permute_ps(x, 0xb1); }

// 2 * LANES words (first[i], second[i]), the lower half first.
CAESURA_INLINE void interleave(const bf16* first, const bf16* second, F& low, F& high) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    low = (F)_mm512_permutex2var_epi16(a, order, b);
    high = (F)_mm512_permutex2var_epi16(a, _mm512_or_si512(order, _mm512_set1_epi16(16)), b);
}

// The sums over the lanes of LANES vectors, as one vector: join() of what fold() makes of every four in turn. Each sum is the
// same tree: lanes 2 apart, then 1, then quarters of a register.
constexpr int FOLDS = 4;

CAESURA_INLINE F fold(const F (&x)[4]) {
    const F low = add(_mm512_mask_blend_ps(0xcccc, x[0], x[1]), _mm512_shuffle_ps(x[0], x[1], 0x4e));
    const F high = add(_mm512_mask_blend_ps(0xcccc, x[2], x[3]), _mm512_shuffle_ps(x[2], x[3], 0x4e));
    return add(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}
CAESURA_INLINE F join(const F (&x)[4]) {
    const F low = add(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    const F high = add(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

CAESURA_INLINE F unpack_low2(F a, F b) { return (F)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
CAESURA_INLINE F unpack_high2(F a, F b) { return (F)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }

// Word j of line i becomes word i of line j: rows meet by one word, then by two, then quarters of a register are sorted.
CAESURA_INLINE void transpose(F (&x)[16]) {
    F y[16];
    for (int i = 0; i < 16; i += 4) {
        const F a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
        const F c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = unpack_low2(a, c), y[i + 1] = unpack_high2(a, c), y[i + 2] = unpack_low2(b, d), y[i + 3] = unpack_high2(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const F a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
        const F c = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd), d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(a, b, 0x88), x[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88), x[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

// Past the caches; 64-byte aligned.
CAESURA_INLINE void stream(float* p, F x) { _mm512_stream_ps(p, x); }

// Bitwise operations.
CAESURA_INLINE F difference(F a, F b) { return _mm512_xor_ps(a, b); }
CAESURA_INLINE F either(F a, F b) { return _mm512_or_ps(a, b); }
CAESURA_INLINE bool any(F x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }

// The lanes that are below 0, as bits.
CAESURA_INLINE uint32_t negative(F x) { return _mm512_movepi32_mask((__m512i)x); }

// As that of sampler_filter.h, by one instruction.
CAESURA_INLINE int64_t compress(float* p, F x, uint32_t lanes) {
    store(p, _mm512_maskz_compress_ps((__mmask16)lanes, x));
    return __builtin_popcount(lanes);
}
