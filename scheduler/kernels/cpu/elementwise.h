// Norms and gates of rows, element by element; included in the namespace of each instruction set.

// A step works on a whole vector, or on the n lanes of a last one; the compiler sees which.
template <bool WHOLE, class E>
CAESURA_INLINE F get(const E* p, int64_t n) {
    if constexpr (WHOLE) return load(p);
    return load(p, n);
}
template <bool WHOLE, class E>
CAESURA_INLINE void put(E* p, F x, int64_t n) {
    if constexpr (WHOLE) return store(p, x);
    store(p, x, n);
}

template <bool WHOLE, class E>
CAESURA_INLINE F square_step(const E* x, E* residual, int64_t n, F sum) {
    F value = get<WHOLE>(x, n);
    if (residual) {
        const F exact = add(get<WHOLE>(residual, n), value);
        put<WHOLE>(residual, exact, n);
        value = rounded(exact, E());
    }
    return fma(value, value, sum);
}

// 1 / sqrt(mean of squares + eps) of x, or of residual += x. Four sums hide the latency of their additions.
template <class E>
static float inverse_rms(const E* x, E* residual, int64_t size, float eps) {
    F sum[4] = {zero(), zero(), zero(), zero()};
    int64_t c = 0;
    for (; c + 4 * LANES <= size; c += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * LANES;
            sum[i] = square_step<true>(x + at, residual ? residual + at : nullptr, LANES, sum[i]);
        }
    for (int i = 0; c + LANES <= size; c += LANES, i++)
        sum[i] = square_step<true>(x + c, residual ? residual + c : nullptr, LANES, sum[i]);
    if (c < size) sum[3] = square_step<false>(x + c, residual ? residual + c : nullptr, size - c, sum[3]);
    const float total = reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    return 1.0f / std::sqrt(total / (float)size + eps);
}

// Not yet rounded after the weight.
template <bool WHOLE, bool FROM_ONE, class E>
CAESURA_INLINE F normal(const E* x, const E* weight, float inverse, int64_t n) {
    const F unit = mul(get<WHOLE>(x, n), set1(inverse)), factor = get<WHOLE>(weight, n);
    if constexpr (FROM_ONE) return mul(unit, add(set1(1.0f), factor));
    return mul(rounded(unit, E()), factor);
}

// x * sigmoid(slope x). e^-x as a square: exp() ends at EXP_MAX, and here infinity has to be reached.
CAESURA_INLINE F swish(F x, float slope) {
    const F root = exp(mul(x, set1(-0.5f * slope)));
    return div(x, fma(root, root, set1(1.0f)));
}

// Hendrycks and Gimpel, 2016, arXiv:1606.08415: the form with tanh.
CAESURA_INLINE F gelu_tanh(F x) {
    const F cubed = mul(mul(x, x), x), inner = mul(fma(set1(0.044715f), cubed, x), set1(0.7978845608f));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// Not yet rounded.
template <int BEND, class E>
CAESURA_INLINE F gated(F x, F y, E type) {
    if constexpr (BEND == CLAMPED) {  // the second argument of min() and max() where either is NaN
        x = min(set1(7.0f), x);
        y = rounded(add(max(set1(-7.0f), min(set1(7.0f), y)), set1(1.0f)), type);
        x = swish(x, 1.702f);
    } else {
        x = BEND == SILU ? swish(x, 1.0f) : gelu_tanh(x);
    }
    return mul(rounded(x, type), y);
}
