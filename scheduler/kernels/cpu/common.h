// Common parts of the kernels: instruction sets, vectors of floats, splitting work over threads.
//
// Invariants:
// - Raw pointers, int64 sizes and strides (in elements), a thread count and nothing else cross the C boundary. A kernel
//   allocates nothing, keeps nothing, throws nothing, and never runs more threads than it was told.
// - The library is one ordinary compile for the base instruction set. Code for more runs only after native.cpp has seen
//   that processor and operating system have it. No function of the standard library is instantiated inside such code:
//   the linker could choose that copy for everybody.
// - Rounding and the order of additions never depend on how many rows there are, where they lie, or on the number of
//   threads. `-ffp-contract=off` is part of this: what is fused is written as fma().
//
// An operation is one file, compiled once for the outside and once per instruction set:
//
//     #ifndef CAESURA_ISA
//       #include "common.h"
//       #define CAESURA_FILE "operation.cpp"
//       #include "each_isa.h"                       // the part below, as avx2::, avx512:: and avx512bf16::, or as
//                                                   // neon:: and neonbf16::
//       CAESURA_API void operation(...) { CAESURA_DISPATCH(rows(...)); }
//     #else
//       namespace CAESURA_ISA { static void rows(...) { F x = load(p); ... } }
//     #endif
//
// GCC inlines a function only into one whose target has all its instructions, so a template cannot take the instruction
// set as a parameter: the compiler has to see the code once under each target.
#pragma once

#if !defined(__linux__) || !defined(__GNUC__) || defined(__clang__) || !(defined(__x86_64__) || defined(__aarch64__))
#error "these kernels are written for Linux and GCC, on x86-64 or 64-bit ARM; elsewhere the engine runs on torch"
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#define CAESURA_API extern "C" __attribute__((visibility("default")))
#define CAESURA_INLINE static inline __attribute__((always_inline, unused))

// The code that serves, as numbered in native.py; more includes less.
#if defined(__x86_64__)
enum Isa : int { NONE = 0, AVX2 = 1, AVX512 = 2, AVX512BF16 = 3, AMX = 4 };
#else
enum Isa : int { NONE = 0, NEON = 1, NEONBF16 = 2 };
#endif

namespace caesura {
extern int active_isa;  // native.cpp: the best there is, or what caesura_use_isa() chose of it
}

// Calls the function of the active instruction set. With AMX that is the one for AVX-512, where no code chooses tiles itself.
#if defined(__x86_64__)
#define CAESURA_DISPATCH(...)                                \
    do {                                                     \
        switch (caesura::active_isa) {                       \
            case NONE:                                       \
            case AVX2: avx2::__VA_ARGS__; break;             \
            case AVX512: avx512::__VA_ARGS__; break;         \
            default: avx512bf16::__VA_ARGS__; break;         \
        }                                                    \
    } while (0)
#else
#define CAESURA_DISPATCH(...)                                \
    do {                                                     \
        switch (caesura::active_isa) {                       \
            case NONE:                                       \
            case NEON: neon::__VA_ARGS__; break;             \
            default: neonbf16::__VA_ARGS__; break;           \
        }                                                    \
    } while (0)
#endif

// Gives way to another thread of this core, in a loop that waits.
CAESURA_INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}

// Asks for the line at `p`, for the first-level or the second-level cache.
CAESURA_INLINE void fetch_first(const void* p) { __builtin_prefetch(p, 0, 3); }
CAESURA_INLINE void fetch_second(const void* p) { __builtin_prefetch(p, 0, 2); }

struct bf16 {
    uint16_t bits;
};

// IEEE 754's binary16. What exceeds 65504 becomes infinite when it is stored.
struct fp16 {
    uint16_t bits;
};

// The type that products compute with: E itself, or float where E is widened as it is loaded.
template <class E>
struct ComputedAs {
    using type = E;
};
template <>
struct ComputedAs<fp16> {
    using type = float;
};
template <class E>
using Computed = typename ComputedAs<E>::type;

// MACRO(suffix of the function's name, type) for each element type of tensors.
#define CAESURA_EACH_TYPE(MACRO) MACRO(bf16, bf16) MACRO(f16, fp16) MACRO(f32, float)

// float8_e4m3fn. Only weights are, always with scales.
struct fp8 {
    uint8_t bits;
};
// Integers, likewise; int4: codes of four bits that number integers of a table.
struct int8 {
    int8_t value;
};
struct int4 {};

template <class W>
constexpr int64_t VALUES = 4 / sizeof(W);  // of a word
template <>
inline constexpr int64_t VALUES<int4> = 8;

CAESURA_INLINE float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

// Without F16C, which the base instruction set of x86-64 lacks. A subnormal number is a multiple of 2^-24.
CAESURA_INLINE float to_float(fp16 x) {
    const uint32_t size = x.bits & 0x7fff;
    uint32_t bits = (size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23);
    const float subnormal = (float)size * 0x1p-24f;
    if (size < 0x400) std::memcpy(&bits, &subnormal, sizeof bits);
    bits |= uint32_t(x.bits & 0x8000) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

CAESURA_INLINE float to_float(float x) { return x; }

CAESURA_INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
CAESURA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
CAESURA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2: ln 2 is split so that n * LN2_HIGH is exact (Cody and
// Waite: Software Manual for the Elementary Functions, 1980), exp(r) is a polynomial of degree 7 (coefficients of expf in
// S. Moshier's Cephes library). Below EXP_MIN, the logarithm of the smallest normal float, the result is 0.
constexpr float LOG2_E = 1.44269504088896341f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float EXP_MIN = -87.33654f, EXP_MAX = 88.0f;
constexpr float EXP_P[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                           4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
// Polynomial in x^2 for (tanh(x) - x) / x^3.
constexpr float TANH_P[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                            -3.33332819422e-1f};

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "simd_avx2.h"
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#define CAESURA_HAS_BF16 0
#include "simd_avx512.h"
#undef CAESURA_HAS_BF16
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512bf16 {
#define CAESURA_HAS_BF16 1
#include "simd_avx512.h"
#undef CAESURA_HAS_BF16
}
#pragma GCC pop_options

#else

namespace neon {
#define CAESURA_HAS_BF16 0
#include "simd_neon.h"
#undef CAESURA_HAS_BF16
}

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16+dotprod")
namespace neonbf16 {
#define CAESURA_HAS_BF16 1
#include "simd_neon.h"
#undef CAESURA_HAS_BF16
}
#pragma GCC pop_options

#endif
