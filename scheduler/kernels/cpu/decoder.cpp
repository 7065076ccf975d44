// A dense decoder between its embeddings and its head in one call: what Python would otherwise ask for operation by operation, and one team of
// threads that goes through all of them. Between two calls a team falls asleep, and to wake it takes longer than many an
// operation of a small model.
//
// Invariant: the operations, their arguments and their order are those of layers/, so the bits are, too.
#include "operations.h"

namespace {

using namespace caesura;

// One layer's tensors, in the order of kernels/decoder.py; nullptr: there is none.
struct Layer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *mlp_norm, *gate_up, *down;
    void *keys, *values;
};

constexpr int64_t LAYER_STAGES = 9, LAST_STAGES = 1;

int64_t counters_of(int64_t layers, int threads) {
    return (layers * LAYER_STAGES + LAST_STAGES) * Team::counters(threads);
}

using Step = DecoderStep;

template <class E>
void product(const Step& s, const void* x, int64_t inputs, const void* weight, const void* bias, void* y, int64_t outputs,
             Team& team) {
    const int64_t bytes = inputs * sizeof(E);
    linear(Linear{x, bytes, weight, bias, y, outputs, s.tokens, outputs, bytes / 4}, team, E());
}

// `first`: there is no update yet. Afterwards there is.
template <class E>
void layer(const Layer& w, const Step& s, bool first, Team& team) {
    const int64_t T = s.tokens, H = s.hidden, I = s.intermediate, D = s.head_size;
    const int64_t q = s.heads * D, qkv = q + 2 * s.kv_heads * D;
    rms_norm({first ? s.residual : s.update, H, first ? nullptr : s.residual, H, w.input_norm, s.x, H, T, H, s.eps, false}, team, E());
    product<E>(s, s.x, H, w.qkv, w.qkv_bias, s.qkv, qkv, team);
    rope_store({s.qkv, qkv, s.heads, s.kv_heads, D, D, w.q_norm, w.k_norm, s.head_eps, false, s.cos, s.sin, s.angles_row,
                s.positions, s.slots, w.keys, w.values, s.qkv, qkv, T}, team, E());
    attention({s.qkv, qkv, D, w.keys, w.values, s.kv_heads, s.heads / s.kv_heads, D, D, s.pages, s.pages_row, s.tasks,
               s.num_tasks, {0, s.scale, 0.0f, nullptr}, s.attended, q, s.scratch, s.thread_floats}, team, E());
    product<E>(s, s.attended, q, w.o, w.o_bias, s.x, H, team);
    rms_norm({s.x, H, s.residual, H, w.mlp_norm, s.x, H, T, H, s.eps, false}, team, E());
    product<E>(s, s.x, H, w.gate_up, nullptr, s.gate_up, 2 * I, team);
    gate_mul({s.gate_up, 2 * I, s.gated, I, T, I, SILU}, team, E());
    product<E>(s, s.gated, I, w.down, nullptr, s.update, H, team);
}

template <class E>
void decoder(const Layer* layers, int64_t count, const Step& step, Counter* counters, int threads) {
    std::memset(counters, 0, counters_of(count, threads) * sizeof(Counter));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team(omp_get_thread_num(), omp_get_num_threads(), counters);
        for (int64_t i = 0; i < count; i++) layer<E>(layers[i], step, i == 0, team);
        const Step& s = step;
        last_norm({s.residual, s.update, s.sampled, s.last_norm, s.out, s.num_sampled, s.hidden, s.eps, false}, team, E());
    }
}

}  // namespace

// Bytes of counters that a call needs, from a multiple of 64 on.
CAESURA_API int64_t caesura_decoder_counters(int64_t layers, int threads) {
    return counters_of(layers, threads) * sizeof(Counter);
}

CAESURA_API void caesura_decoder_bf16(const void* layers, int64_t count, const void* step, void* counters, int threads) {
    decoder<bf16>((const Layer*)layers, count, *(const Step*)step, (Counter*)counters, threads);
}

CAESURA_API void caesura_decoder_f32(const void* layers, int64_t count, const void* step, void* counters, int threads) {
    decoder<float>((const Layer*)layers, count, *(const Step*)step, (Counter*)counters, threads);
}
