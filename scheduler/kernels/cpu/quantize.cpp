// Rows of weights as whole numbers of 8 or 4 bits, or as E2M1, with a scale for each block: quantize() of
// layers/scaled_blocks.py, bit for bit. Written as plain loops over a block, which the compiler turns into vectors.
//
// Codes of four bits lie as in linear_int8.h: a word of eight has the first four in the lower halves of its bytes.
#ifndef CAESURA_ISA

#include "operations.h"

#include <cfloat>

using namespace caesura;

namespace {

// Formats, as numbered in kernels/quantize.py.
enum Format : int { WHOLE8 = 0, WHOLE4 = 1, E2M1 = 2 };

template <Format FORMAT>
constexpr int64_t COLUMNS = FORMAT == WHOLE8 ? INT8_COLUMNS : INT4_COLUMNS;

struct Quantized {
    char* numbers;  // of a row; what has four bits takes half a byte
    float* scales;  // of its blocks, each `next` floats after the one before
    int64_t next;
};

CAESURA_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

CAESURA_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

constexpr uint32_t MAGNITUDE = 0x7fffffff;
// Added to a float below 2^22, its sum has the rounded number in its last bits.
constexpr float ROUND = 0x1.8p23f;
constexpr uint32_t ROUND_BITS = 0x4b400000;
constexpr float TINY = (float)(448.0 / (double)FLT_MAX);  // blocks of smaller values are zero

// The factor of a block's values, given their largest magnitude, which is finite.
template <Format FORMAT>
CAESURA_INLINE float factor_of(float most) {
    if (most < TINY) return 1.0f;
    if constexpr (FORMAT == E2M1) return float_of((257 - (bits_of(most) >> 23)) << 23);  // to 8 and more, below 16
    return 1.0f / most * (FORMAT == WHOLE8 ? 127.0f : 7.0f);
}

// The code of a number that is below 16 in size. Numbers of E2M1, doubled, are whole below 4; from there on they have one bit
// of mantissa. 16 becomes 12, and -0 becomes 0.
CAESURA_INLINE int32_t e2m1_code(float x) {
    const int32_t bits = (int32_t)bits_of(x), size = bits & MAGNITUDE;
    const int32_t small = (int32_t)(bits_of(float_of(size) + ROUND) - ROUND_BITS);
    int32_t large = ((size + 0x1fffff + (size >> 22 & 1)) >> 22) - 254;
    large = large > 7 ? 7 : large;
    const int32_t is_small = (size - 0x40800000) >> 31, code = (small & is_small) | (large & ~is_small);
    return code | (-code >> 28 & bits >> 28 & 8);
}

}  // namespace

#define CAESURA_FILE "quantize.cpp"
#include "each_isa.h"

namespace {

template <class E>
void quantize_rows(const char* x, int64_t stride, int64_t rows, int64_t inputs, int format, char* numbers,
                   int64_t numbers_row, float* scales, int threads) {
    constexpr int64_t ELEMENTS = 8192, PARALLEL = 1 << 15;  // of a task; worth waking the other threads
    const int64_t each = ELEMENTS / inputs + 1;
    run_team(threads, rows * inputs > PARALLEL, [&](Team& team) {
        team.each((rows + each - 1) / each, [&](int64_t task, int64_t) {
            for (int64_t row = task * each; row < smaller((task + 1) * each, rows); row++) {
                const E* from = (const E*)(x + row * stride);
                const Quantized to = {numbers + row * numbers_row, scales + row, rows};
                switch (format) {
                    case WHOLE8: CAESURA_DISPATCH(quantize_row<WHOLE8>(from, inputs, to)); break;
                    case WHOLE4: CAESURA_DISPATCH(quantize_row<WHOLE4>(from, inputs, to)); break;
                    default: CAESURA_DISPATCH(quantize_row<E2M1>(from, inputs, to));
                }
            }
        });
    });
}

}  // namespace

// The stride of x in bytes; scales [blocks, rows].
#define CAESURA_QUANTIZE(NAME, E)                                                                                         \
    CAESURA_API void caesura_quantize_rows_##NAME(const void* x, int64_t stride, int64_t rows, int64_t inputs, int format, \
                                                  void* numbers, int64_t numbers_row, float* scales, int threads) {       \
        quantize_rows<E>((const char*)x, stride, rows, inputs, format, (char*)numbers, numbers_row, scales, threads);     \
    }
CAESURA_EACH_TYPE(CAESURA_QUANTIZE)

#else

namespace CAESURA_ISA {

// Numbers as bytes, of a block that is finite.
template <Format FORMAT, class Load>
CAESURA_INLINE void number_block(const Load& value_at, float factor, uint8_t* numbers) {
    constexpr int64_t SIZE = COLUMNS<FORMAT>;
    alignas(64) float scaled[FORMAT == E2M1 ? SIZE : 1];
    const F factors = set1(factor);
    for (int64_t i = 0; i < SIZE; i += LANES) {
        const F value = mul(value_at(i), factors);
        if constexpr (FORMAT == E2M1) {
            store(scaled + i, value);
        } else {
            store_bytes((char*)numbers + i, value);
        }
    }
    if constexpr (FORMAT == E2M1)
        for (int64_t i = 0; i < SIZE; i++) numbers[i] = e2m1_code(scaled[i]);
}

template <Format FORMAT, class Load>
CAESURA_INLINE float quantize_block(const Load& value_at, uint8_t* numbers) {
    F largest = zero(), least = zero(), wrong = zero();
    for (int64_t i = 0; i < COLUMNS<FORMAT>; i += LANES) {
        const F value = value_at(i);
        largest = max(largest, value), least = min(least, value);
        wrong = fma(value, zero(), wrong);
    }
    if (const float sum = reduce_add(wrong); __builtin_expect(sum != 0.0f, false)) {  // NaN is unequal, too
        std::memset(numbers, 0, COLUMNS<FORMAT>);
        bool is_infinite = FORMAT != E2M1;
        for (int64_t i = 0; i < COLUMNS<FORMAT>; i += LANES) {
            float values[LANES];
            store(values, value_at(i));
            for (const float value : values) is_infinite &= value == value;
        }
        return is_infinite ? INFINITY : NAN;
    }
    const float factor = factor_of<FORMAT>(reduce_max(max(largest, sub(zero(), least))));
    number_block<FORMAT>(value_at, factor, numbers);
    return 1.0f / factor;
}

template <Format FORMAT, class E>
static void quantize_row(const E* x, int64_t inputs, Quantized to) {
    constexpr int64_t SIZE = COLUMNS<FORMAT>;
    alignas(64) uint8_t numbers[SIZE];
    for (int64_t begin = 0; begin < inputs; begin += SIZE, x += SIZE, to.scales += to.next) {
        const int64_t count = smaller(SIZE, inputs - begin);
        if (count == SIZE) {
            *to.scales = quantize_block<FORMAT>([&](int64_t i) __attribute__((always_inline)) { return load(x + i); }, numbers);
        } else {
            *to.scales = quantize_block<FORMAT>(
                [&](int64_t i) __attribute__((always_inline)) {
                    return count - i >= LANES ? load(x + i) : count > i ? load(x + i, count - i) : zero();
                },
                numbers);
        }
        if constexpr (FORMAT == WHOLE8) {
            std::memcpy(to.numbers + begin, numbers, count);
        } else {
            constexpr uint32_t LOWER = 0x0f0f0f0f;
            uint32_t words[SIZE / 4], codes[SIZE / 8];
            std::memcpy(words, numbers, SIZE);
            for (int64_t i = 0; i < SIZE / 8; i++) codes[i] = (words[2 * i] & LOWER) | (words[2 * i + 1] & LOWER) << 4;
            std::memcpy(to.numbers + begin / 2, codes, count / 2);
        }
    }
}

}  // namespace CAESURA_ISA

#endif
