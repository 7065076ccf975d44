// The instruction sets that this machine permits, and the one in use.
#include "operations.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)

// Linux gives the tile registers to a process that has asked for them: their state would not fit the signal frames of
// programs that do not know of it.
bool tiles_permitted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Feature bits that __builtin_cpu_supports does not know in every compiler.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// __builtin_cpu_supports asks the processor for the instructions and the operating system for the registers.
int best_isa() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return NONE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return AVX2;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return AVX512;
    return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") && tiles_permitted() ? AMX : AVX512BF16;
}
#else
// NEON is part of 64-bit ARM.
int best_isa() {
    constexpr unsigned long BF16 = 1ul << 14, DOT = 1ul << 20;  // Linux's HWCAP2_BF16, HWCAP_ASIMDDP
    return getauxval(AT_HWCAP2) & BF16 && getauxval(AT_HWCAP) & DOT ? NEONBF16 : NEON;
}
#endif

}  // namespace

namespace caesura {
int active_isa = NONE;  // until caesura_use_isa(), which comes first
}

// Selects `isa`, or the best that the machine permits below it; returns the one in use. Not while a kernel runs.
CAESURA_API int caesura_use_isa(int isa) {
    static const int best = best_isa();
    caesura::active_isa = isa < best ? isa : best;
    return caesura::active_isa;
}

CAESURA_API int caesura_isa() { return caesura::active_isa; }

// Rises, with _ABI in native.py, whenever the arguments of a kernel change: a library left over from an earlier
// installation is then seen, not called.
CAESURA_API int caesura_abi() { return 30; }

// Compared with that of the structure in native.py: one that is too short would be read beyond its end.
CAESURA_API int caesura_decoder_step_bytes() { return sizeof(caesura::DecoderStep); }
CAESURA_API int caesura_layer_tensors_bytes() { return sizeof(caesura::LayerTensors); }
CAESURA_API int caesura_logit_edits_bytes() { return sizeof(caesura::LogitEdits); }
CAESURA_API int caesura_further_logprobs_bytes() { return sizeof(caesura::FurtherLogprobs); }
CAESURA_API int caesura_sampling_bytes() { return sizeof(caesura::Sampling); }
CAESURA_API int caesura_layer_form_bytes() { return sizeof(caesura::LayerForm); }
