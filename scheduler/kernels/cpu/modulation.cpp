// Operations between the products of a transformer of images, each in one pass over memory: gated residuals, norms that a
// timestep scales and shifts, the heads of image and text beside each other, and GELU.
//
// Invariants:
// - A row's bits depend on that row alone, and on its sample's gate, scale and shift.
// - Arithmetic is float32; what is stored is rounded once, and a norm is that of the stored sum.
// - Rows are contiguous. Outputs are other memory than inputs, except that GELU is in place.
#ifndef CAESURA_ISA

#include "operations.h"

#include <type_traits>

using namespace caesura;

namespace {

// Elements that are worth waking the other threads.
constexpr int64_t PARALLEL = 1 << 15;

template <class E>
struct Modulation {
    const E *x, *update, *gate;
    E* sum;  // x + gate * update, if there is an update; else x is normalised as it is
    const E *scale, *shift;
    int64_t sample_elements;  // from a sample's gate, scale or shift to the next one's
    E* out;                   // null: the sum alone
    int64_t tokens, size;
    float eps;
};

template <class E>
struct Heads {
    const E *x[2], *weight[2];  // of image and text; weight null: as they are
    int64_t tokens[2];
    E* out;
    int64_t heads, size;
    float eps;
};

constexpr int64_t GELU_ELEMENTS = 1 << 12;  // of a task

}  // namespace

#define CAESURA_FILE "modulation.cpp"
#include "each_isa.h"

#define CAESURA_MODULATION(NAME, E)                                                                                        \
    /* x, update, sum and out: [samples, tokens, size]. */                                                                 \
    CAESURA_API void caesura_modulate_##NAME(const E* x, const E* update, const E* gate, E* sum, const E* scale,           \
                                             const E* shift, int64_t sample_elements, E* out, int64_t samples,             \
                                             int64_t tokens, int64_t size, float eps, int threads) {                       \
        const Modulation<E> a = {x, update, gate, sum, scale, shift, sample_elements, out, tokens, size, eps};             \
        run_team(threads, samples * tokens * size > PARALLEL, [&](Team& team) {                                            \
            team.each(samples * tokens, [&](int64_t row, int64_t) { CAESURA_DISPATCH(modulated_row(a, row)); });           \
        });                                                                                                                \
    }                                                                                                                      \
    /* image [samples, image_tokens, heads, size] and text alike, to out [samples, image_tokens + text_tokens, heads,      \
       size]. */                                                                                                           \
    CAESURA_API void caesura_join_heads_##NAME(const E* image, const E* image_weight, int64_t image_tokens, const E* text, \
                                               const E* text_weight, int64_t text_tokens, E* out, int64_t samples,         \
                                               int64_t heads, int64_t size, float eps, int threads) {                      \
        const Heads<E> a = {{image, text}, {image_weight, text_weight}, {image_tokens, text_tokens}, out, heads, size,     \
                            eps};                                                                                          \
        const int64_t rows = samples * (image_tokens + text_tokens);                                                       \
        run_team(threads, rows * heads * size > PARALLEL, [&](Team& team) {                                                \
            team.each(rows, [&](int64_t row, int64_t) { CAESURA_DISPATCH(heads_of_row(a, row)); });                        \
        });                                                                                                                \
    }                                                                                                                      \
    CAESURA_API void caesura_gelu_tanh_##NAME(E* x, int64_t elements, int threads) {                                       \
        run_team(threads, elements > PARALLEL, [&](Team& team) {                                                           \
            team.each((elements + GELU_ELEMENTS - 1) / GELU_ELEMENTS, [&](int64_t task, int64_t) {                         \
                const int64_t start = task * GELU_ELEMENTS;                                                                \
                CAESURA_DISPATCH(bend(x + start, smaller(GELU_ELEMENTS, elements - start)));                               \
            });                                                                                                            \
        });                                                                                                                \
    }
CAESURA_EACH_TYPE(CAESURA_MODULATION)

#else

namespace CAESURA_ISA {

#include "elementwise.h"

// f(at, n, whole) for each vector of a row.
template <class Step>
CAESURA_INLINE void each_vector(int64_t size, const Step& step) {
    int64_t c = 0;
    for (; c + LANES <= size; c += LANES) step(c, (int64_t)LANES, std::true_type());
    if (c < size) step(c, size - c, std::false_type());
}

template <class E>
static void modulated_row(const Modulation<E>& a, int64_t row) {
    const int64_t at = row * a.size, of_sample = row / a.tokens * a.sample_elements;
    const E* x = a.x + at;
    F sums[2] = {zero(), zero()};
    if (a.update) {
        const E *update = a.update + at, *gate = a.gate + of_sample;
        E* sum = a.sum + at;
        each_vector(a.size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
            constexpr bool W = decltype(whole)::value;
            const F value = fma(get<W>(gate + c, n), get<W>(update + c, n), get<W>(x + c, n));
            put<W>(sum + c, value, n);
            sums[0] = add(sums[0], rounded(value, E()));
        });
        x = sum;
        if (!a.out) return;
    } else {
        each_vector(a.size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
            sums[0] = add(sums[0], get<decltype(whole)::value>(x + c, n));
        });
    }
    const F mean = set1(reduce_add(sums[0]) / (float)a.size);
    each_vector(a.size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
        F away = sub(get<decltype(whole)::value>(x + c, n), mean);
        if constexpr (!decltype(whole)::value) away = keep_first(away, n, zero());
        sums[1] = fma(away, away, sums[1]);
    });
    const F inverse = set1(1.0f / std::sqrt(reduce_add(sums[1]) / (float)a.size + a.eps)), one = set1(1.0f);
    const E *scale = a.scale + of_sample, *shift = a.shift + of_sample;
    E* out = a.out + at;
    each_vector(a.size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
        constexpr bool W = decltype(whole)::value;
        const F unit = mul(sub(get<W>(x + c, n), mean), inverse);
        put<W>(out + c, fma(unit, add(one, get<W>(scale + c, n)), get<W>(shift + c, n)), n);
    });
}

template <class E>
static void heads_of_row(const Heads<E>& a, int64_t row) {
    const int64_t both = a.tokens[0] + a.tokens[1], sample = row / both, place = row % both;
    const int text = place >= a.tokens[0];
    const int64_t token = sample * a.tokens[text] + place - text * a.tokens[0], width = a.heads * a.size;
    const E *x = a.x[text] + token * width, *weight = a.weight[text];
    E* out = a.out + row * width;
    if (!weight) {
        std::memcpy(out, x, width * sizeof(E));
        return;
    }
    for (int64_t head = 0; head < a.heads; head++, x += a.size, out += a.size) {
        const float inverse = inverse_rms<E>(x, nullptr, a.size, a.eps);
        each_vector(a.size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
            constexpr bool W = decltype(whole)::value;
            put<W>(out + c, normal<W, false>(x + c, weight + c, inverse, n), n);
        });
    }
}

// Hendrycks and Gimpel, 2016, arXiv:1606.08415: the form with tanh, whose x (1 + tanh y) / 2 is x sigmoid(2 y).
template <class E>
static void bend(E* x, int64_t size) {
    each_vector(size, [&](int64_t c, int64_t n, auto whole) __attribute__((always_inline)) {
        constexpr bool W = decltype(whole)::value;
        const F value = get<W>(x + c, n);
        const F inner = mul(fma(set1(0.044715f), mul(mul(value, value), value), value), set1(0.7978845608f));
        const F root = exp(sub(zero(), inner));
        put<W>(x + c, div(value, fma(root, root, set1(1.0f))), n);
    });
}

}  // namespace CAESURA_ISA

#endif
