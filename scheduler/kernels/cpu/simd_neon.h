// Vectors of 8 floats in two registers; the same names as simd_avx512.h, which describes them. Sums over lanes are the trees of
// simd_avx2.h.

struct F {
    float32x4_t low, high;
};
constexpr int LANES = 8;
constexpr bool PAIRS = CAESURA_HAS_BF16;
struct Two {
    F first, second;
};

CAESURA_INLINE F zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
CAESURA_INLINE F set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
CAESURA_INLINE F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
CAESURA_INLINE void store(float* p, F x) { vst1q_f32(p, x.low), vst1q_f32(p + 4, x.high); }
CAESURA_INLINE F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
CAESURA_INLINE F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
CAESURA_INLINE F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
CAESURA_INLINE F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
CAESURA_INLINE F fma(F a, F b, F c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
CAESURA_INLINE F fms(F a, F b, F c) {
    return {vfmaq_f32(vnegq_f32(c.low), a.low, b.low), vfmaq_f32(vnegq_f32(c.high), a.high, b.high)};
}
// vmaxq_f32 gives NaN where either is, and the larger of 0 and -0.
CAESURA_INLINE float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
CAESURA_INLINE float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
CAESURA_INLINE F max(F a, F b) { return {max(a.low, b.low), max(a.high, b.high)}; }
CAESURA_INLINE F min(F a, F b) { return {min(a.low, b.low), min(a.high, b.high)}; }

CAESURA_INLINE float32x4_t swap_halves(float32x4_t x) { return vextq_f32(x, x, 2); }
CAESURA_INLINE float reduce_add(F x) {
    float32x4_t y = vaddq_f32(x.low, x.high);
    y = vaddq_f32(y, swap_halves(y));
    return vgetq_lane_f32(y, 0) + vgetq_lane_f32(y, 1);
}
CAESURA_INLINE float reduce_max(F x) {
    float32x4_t y = max(x.low, x.high);
    y = max(y, swap_halves(y));
    const float a = vgetq_lane_f32(y, 0), b = vgetq_lane_f32(y, 1);
    return a > b ? a : b;
}

// Bitwise operations.
CAESURA_INLINE uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
CAESURA_INLINE float32x4_t of_bits(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
CAESURA_INLINE F both(F x, uint32_t mask) {
    const uint32x4_t bits = vdupq_n_u32(mask);
    return {of_bits(vandq_u32(bits_of(x.low), bits)), of_bits(vandq_u32(bits_of(x.high), bits))};
}
CAESURA_INLINE F difference(F a, F b) {
    return {of_bits(veorq_u32(bits_of(a.low), bits_of(b.low))), of_bits(veorq_u32(bits_of(a.high), bits_of(b.high)))};
}
CAESURA_INLINE F either(F a, F b) {
    return {of_bits(vorrq_u32(bits_of(a.low), bits_of(b.low))), of_bits(vorrq_u32(bits_of(a.high), bits_of(b.high)))};
}
CAESURA_INLINE bool any(F x) { return vmaxvq_u32(vorrq_u32(bits_of(x.low), bits_of(x.high))) != 0; }
CAESURA_INLINE uint32_t negative(F x) {
    constexpr int32_t PLACES[] = {0, 1, 2, 3};
    const uint32x4_t low = vshlq_u32(vshrq_n_u32(bits_of(x.low), 31), vld1q_s32(PLACES));
    const uint32x4_t high = vshlq_u32(vshrq_n_u32(bits_of(x.high), 31), vld1q_s32(PLACES));
    return vaddvq_u32(low) | vaddvq_u32(high) << 4;
}

CAESURA_INLINE F widen(uint16x8_t x) {
    return {of_bits(vshll_n_u16(vget_low_u16(x), 16)), of_bits(vshll_n_u16(vget_high_u16(x), 16))};
}
CAESURA_INLINE F load(const bf16* p) { return widen(vld1q_u16((const uint16_t*)p)); }

CAESURA_INLINE uint32x4_t narrowed(float32x4_t x) {
    const uint32x4_t bits = bits_of(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
CAESURA_INLINE uint16x8_t narrow(F x) {
#if CAESURA_HAS_BF16
    return (uint16x8_t)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.low), x.high);
#else
    return vshrn_high_n_u32(vshrn_n_u32(narrowed(x.low), 16), narrowed(x.high), 16);
#endif
}
CAESURA_INLINE void store(bf16* p, F x) { vst1q_u16((uint16_t*)p, narrow(x)); }

CAESURA_INLINE F from_halves(float16x8_t x) { return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)}; }
CAESURA_INLINE F load(const fp16* p) { return from_halves(vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p))); }
CAESURA_INLINE float16x8_t narrow_to_fp16(F x) { return vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high); }
CAESURA_INLINE void store(fp16* p, F x) { vst1q_u16((uint16_t*)p, vreinterpretq_u16_f16(narrow_to_fp16(x))); }

// Through memory: NEON has no loads of some lanes.
template <class E>
CAESURA_INLINE F load(const E* p, int64_t n) {
    E buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(E));
    return load(buffer);
}
template <class E>
CAESURA_INLINE void store(E* p, F x, int64_t n) {
    E buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(E));
}

CAESURA_INLINE F rounded(F x, float) { return x; }
CAESURA_INLINE F rounded(F x, bf16) {
#if CAESURA_HAS_BF16
    return widen(narrow(x));
#else
    return both({of_bits(narrowed(x.low)), of_bits(narrowed(x.high))}, 0xffff0000);
#endif
}
CAESURA_INLINE F rounded(F x, fp16) { return from_halves(narrow_to_fp16(x)); }

CAESURA_INLINE F load_words(const void* p) {
    const uint8_t* bytes = (const uint8_t*)p;
    return {vreinterpretq_f32_u8(vld1q_u8(bytes)), vreinterpretq_f32_u8(vld1q_u8(bytes + 16))};
}
CAESURA_INLINE F set1_word(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return {of_bits(vdupq_n_u32(word)), of_bits(vdupq_n_u32(word))};
}

CAESURA_INLINE F keep_low(F words) { return both(words, 0xffff); }
CAESURA_INLINE F keep_high(F words) { return both(words, 0xffff0000); }
// The lower number of each word, as a float; keep_high() gives the upper one.
CAESURA_INLINE F lows(F words) {
    return {of_bits(vshlq_n_u32(bits_of(words.low), 16)), of_bits(vshlq_n_u32(bits_of(words.high), 16))};
}

CAESURA_INLINE F swapped(F x) { return {vrev64q_f32(x.low), vrev64q_f32(x.high)}; }

struct Halves {
    F low, high;
};
CAESURA_INLINE F ready(F words, float) { return words; }
#if CAESURA_HAS_BF16
CAESURA_INLINE F ready(F words, bf16) { return words; }
#else
CAESURA_INLINE Halves ready(F words, bf16) { return {lows(words), keep_high(words)}; }
#endif

CAESURA_INLINE F dot(F sum, F a, F b, float) { return fma(a, b, sum); }
#if CAESURA_HAS_BF16
CAESURA_INLINE F dot(F sum, F a, F b, bf16) {
    return {vbfdotq_f32(sum.low, (bfloat16x8_t)a.low, (bfloat16x8_t)b.low),
            vbfdotq_f32(sum.high, (bfloat16x8_t)a.high, (bfloat16x8_t)b.high)};
}
#else
CAESURA_INLINE F dot(F sum, Halves a, Halves b, bf16) { return fma(a.low, b.low, fma(a.high, b.high, sum)); }
CAESURA_INLINE F dot(F sum, F a, F b, bf16) { return dot(sum, ready(a, bf16()), ready(b, bf16()), bf16()); }
#endif

template <class E>
CAESURA_INLINE Two dot(Two sum, const float* word, Two words, E type) {
    const F value = set1_word(word);
    return {dot(sum.first, value, words.first, type), dot(sum.second, value, words.second, type)};
}

struct Ints {
    int32x4_t low, high;
};
using Bytes = F;
CAESURA_INLINE Bytes to_bytes(F words) { return words; }
CAESURA_INLINE int32x4_t dot(int32x4_t sum, float32x4_t x, float32x4_t w) {
    const int8x16_t a = vreinterpretq_s8_f32(x), b = vreinterpretq_s8_f32(w);
#if CAESURA_HAS_BF16
    return vdotq_s32(sum, a, b);
#else
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
}
CAESURA_INLINE Ints dot(Ints sum, F x, Bytes w) { return {dot(sum.low, x.low, w.low), dot(sum.high, x.high, w.high)}; }
CAESURA_INLINE int32_t start_of(const char*, int64_t) { return 0; }
CAESURA_INLINE Ints set1_ints(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
CAESURA_INLINE F to_floats(Ints x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
CAESURA_INLINE F load_table(const int8_t* numbers) {
    const float32x4_t table = vreinterpretq_f32_s8(vld1q_s8(numbers));
    return {table, table};
}
template <bool UPPER>
CAESURA_INLINE float32x4_t from_codes(float32x4_t words, float32x4_t table) {
    const uint8x16_t bytes = vreinterpretq_u8_f32(words), codes = UPPER ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(table), codes));
}
template <bool UPPER>
CAESURA_INLINE F from_codes(F words, F table) {
    return {from_codes<UPPER>(words.low, table.low), from_codes<UPPER>(words.high, table.high)};
}
CAESURA_INLINE void store_bytes(char* p, F x) {
    const int16x4_t low = vmovn_s32(vcvtnq_s32_f32(x.low)), high = vmovn_s32(vcvtnq_s32_f32(x.high));
    vst1_s8((int8_t*)p, vmovn_s16(vcombine_s16(low, high)));
}

CAESURA_INLINE void from_fp16(F words, F& low, F& high) {
    const uint16x8_t first = vreinterpretq_u16_f32(words.low), second = vreinterpretq_u16_f32(words.high);
    low = from_halves(vreinterpretq_f16_u16(vuzp1q_u16(first, second)));
    high = from_halves(vreinterpretq_f16_u16(vuzp2q_u16(first, second)));
}

template <int K>
CAESURA_INLINE float32x4_t from_fp8(float32x4_t words) {
    const int32x4_t first = vshlq_s32(vreinterpretq_s32_f32(words), vdupq_n_s32(24 - 8 * K));
    const int32x4_t bits = vandq_s32(vshrq_n_s32(first, 4), vdupq_n_s32((int32_t)0x87f00000));
    return vmulq_f32(vreinterpretq_f32_s32(bits), vdupq_n_f32(0x1p120f));
}
template <int K>
CAESURA_INLINE F from_fp8(F words) {
    return {from_fp8<K>(words.low), from_fp8<K>(words.high)};
}

CAESURA_INLINE uint32x4_t nan_bytes(float32x4_t words) {
    const uint8x16_t magnitude = vdupq_n_u8(0x7f);
    return vreinterpretq_u32_u8(vceqq_u8(vandq_u8(vreinterpretq_u8_f32(words), magnitude), magnitude));
}
CAESURA_INLINE bool has_nan(F words) { return vmaxvq_u32(vorrq_u32(nan_bytes(words.low), nan_bytes(words.high))) != 0; }
CAESURA_INLINE float32x4_t poisoned(float32x4_t x, float32x4_t words) {
    const uint32x4_t bytes = nan_bytes(words);
    return of_bits(vorrq_u32(bits_of(x), vtstq_u32(bytes, bytes)));
}
CAESURA_INLINE F poisoned(F x, F words) { return {poisoned(x.low, words.low), poisoned(x.high, words.high)}; }

CAESURA_INLINE F pairs(F low, F high) {
    const uint16x8_t first = narrow(low), second = narrow(high);
    return {vreinterpretq_f32_u16(vzip1q_u16(first, second)), vreinterpretq_f32_u16(vzip2q_u16(first, second))};
}

CAESURA_INLINE float32x4_t power_of_two(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
CAESURA_INLINE float32x4_t clear_below(float32x4_t x, float32x4_t result, float least) {
    return of_bits(vbicq_u32(bits_of(result), vcltq_f32(x, vdupq_n_f32(least))));
}
CAESURA_INLINE F exp(F x) {
    const F y = min(set1(EXP_MAX), max(set1(EXP_MIN), x)), scaled = mul(y, set1(LOG2_E));
    const F n = {vrndnq_f32(scaled.low), vrndnq_f32(scaled.high)};
    const F r = fma(n, set1(-LN2_LOW), fma(n, set1(-LN2_HIGH), y));
    F p = set1(EXP_P[0]);
    for (int i = 1; i < 6; i++) p = fma(p, r, set1(EXP_P[i]));
    p = mul(add(fma(p, mul(r, r), r), set1(1.0f)), F{power_of_two(n.low), power_of_two(n.high)});
    return {clear_below(x.low, p.low, EXP_MIN), clear_below(x.high, p.high, EXP_MIN)};
}

CAESURA_INLINE float32x4_t choose_below(float32x4_t size, float limit, float32x4_t below, float32x4_t above) {
    return vbslq_f32(vcltq_f32(size, vdupq_n_f32(limit)), below, above);
}
CAESURA_INLINE F tanh(F x) {
    const F size = both(x, 0x7fffffff), square = mul(x, x);
    F p = set1(TANH_P[0]);
    for (int i = 1; i < 5; i++) p = fma(p, square, set1(TANH_P[i]));
    const F small = fma(mul(p, square), x, x);
    const F large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
    const F signed_large = either(large, both(x, 0x80000000));
    return {choose_below(size.low, 0.625f, small.low, signed_large.low),
            choose_below(size.high, 0.625f, small.high, signed_large.high)};
}

CAESURA_INLINE F keep_first(F x, int64_t n, F rest) {
    constexpr int32_t NUMBERS[] = {0, 1, 2, 3};
    const int32x4_t count = vdupq_n_s32(n < LANES ? (int32_t)n : LANES), numbers = vld1q_s32(NUMBERS);
    const uint32x4_t low = vcgtq_s32(count, numbers), high = vcgtq_s32(count, vaddq_s32(numbers, vdupq_n_s32(4)));
    return {vbslq_f32(low, x.low, rest.low), vbslq_f32(high, x.high, rest.high)};
}

CAESURA_INLINE void interleave(const bf16* first, const bf16* second, F& low, F& high) {
    const uint16_t *a = (const uint16_t*)first, *b = (const uint16_t*)second;
    const uint16x8_t a_low = vld1q_u16(a), a_high = vld1q_u16(a + 8), b_low = vld1q_u16(b), b_high = vld1q_u16(b + 8);
    low = {vreinterpretq_f32_u16(vzip1q_u16(a_low, b_low)), vreinterpretq_f32_u16(vzip2q_u16(a_low, b_low))};
    high = {vreinterpretq_f32_u16(vzip1q_u16(a_high, b_high)), vreinterpretq_f32_u16(vzip2q_u16(a_high, b_high))};
}

constexpr int FOLDS = 2;

// Lanes 2 apart, then 1: of each quarter of the sums, in the low halves and in the high ones.
CAESURA_INLINE float32x4_t fold(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    const float64x2_t x = (float64x2_t)a, y = (float64x2_t)b, z = (float64x2_t)c, w = (float64x2_t)d;
    const float32x4_t low = vaddq_f32((float32x4_t)vzip1q_f64(x, y), (float32x4_t)vzip2q_f64(x, y));
    const float32x4_t high = vaddq_f32((float32x4_t)vzip1q_f64(z, w), (float32x4_t)vzip2q_f64(z, w));
    return vaddq_f32(vuzp1q_f32(low, high), vuzp2q_f32(low, high));
}
CAESURA_INLINE F fold(const F (&x)[4]) {
    return {fold(x[0].low, x[1].low, x[2].low, x[3].low), fold(x[0].high, x[1].high, x[2].high, x[3].high)};
}
CAESURA_INLINE F join(const F (&x)[2]) { return {vaddq_f32(x[0].low, x[0].high), vaddq_f32(x[1].low, x[1].high)}; }

CAESURA_INLINE void transpose(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float32x4_t (&x)[4]) {
    const float64x2_t ab_low = (float64x2_t)vzip1q_f32(a, b), ab_high = (float64x2_t)vzip2q_f32(a, b);
    const float64x2_t cd_low = (float64x2_t)vzip1q_f32(c, d), cd_high = (float64x2_t)vzip2q_f32(c, d);
    x[0] = (float32x4_t)vzip1q_f64(ab_low, cd_low), x[1] = (float32x4_t)vzip2q_f64(ab_low, cd_low);
    x[2] = (float32x4_t)vzip1q_f64(ab_high, cd_high), x[3] = (float32x4_t)vzip2q_f64(ab_high, cd_high);
}
CAESURA_INLINE void transpose(F (&x)[8]) {
    float32x4_t quarters[4][4];
    transpose(x[0].low, x[1].low, x[2].low, x[3].low, quarters[0]);
    transpose(x[4].low, x[5].low, x[6].low, x[7].low, quarters[1]);
    transpose(x[0].high, x[1].high, x[2].high, x[3].high, quarters[2]);
    transpose(x[4].high, x[5].high, x[6].high, x[7].high, quarters[3]);
    for (int i = 0; i < 4; i++) x[i] = {quarters[0][i], quarters[1][i]}, x[4 + i] = {quarters[2][i], quarters[3][i]};
}

CAESURA_INLINE void stream(float* p, F x) { store(p, x); }
