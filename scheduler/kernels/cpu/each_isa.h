// Compiles CAESURA_FILE once per instruction set, with CAESURA_ISA naming the namespace; common.h shows the use. No guard:
// every operation includes it.

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define CAESURA_ISA avx2
#include CAESURA_FILE
#undef CAESURA_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define CAESURA_ISA avx512
#include CAESURA_FILE
#undef CAESURA_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define CAESURA_ISA avx512bf16
#include CAESURA_FILE
#undef CAESURA_ISA
#pragma GCC pop_options

#else

#define CAESURA_ISA neon
#include CAESURA_FILE
#undef CAESURA_ISA

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16+dotprod")
#define CAESURA_ISA neonbf16
#include CAESURA_FILE
#undef CAESURA_ISA
#pragma GCC pop_options

#endif
