// A decoder in one call, with embeddings, head and sampler or without them: what Python would otherwise ask for operation
// by operation, and one team of threads that goes through all of them. Between two calls a team falls asleep, and to wake it
// takes longer than many an operation of a small model.
//
// Invariant: the operations, their arguments and their order are those of layers/, so the bits are, too.
#include "operations.h"

namespace {

using namespace caesura;
using Step = DecoderStep;

constexpr int64_t OTHER_STAGES = 5;  // embeddings, last norm, head (with the rows of an int8 one) and sampler, at most
constexpr int64_t SUMS = 2, ROUND_STAGES = 2;  // of a layer: after attention and at its end

// Stages of a layer, at most.
int64_t stages_of(const LayerForm& form, bool latent) {
    constexpr int64_t NORMS = 4, ATTENTION = 5, LATENT = 4, BLOCK = 3, NARROW = 8, GATE = 2, EXPERTS = 8;
    return NORMS + ATTENTION + NARROW + (latent ? LATENT : 0) + (form.intermediate ? BLOCK : 0) + (form.experts ? GATE + EXPERTS : 0);
}

// Stages of the adapters of four products with seven factors B.
constexpr int64_t ADAPTER_STAGES = 4 * 3 + 7;

// `rounds` of each sum over the ranks.
int64_t counters_of(const LayerForm* forms, int64_t layers, bool latent, bool adapts, int64_t rounds, int threads) {
    int64_t stages = OTHER_STAGES + layers * (SUMS * ROUND_STAGES * rounds + (adapts ? ADAPTER_STAGES : 0));
    for (int64_t i = 0; i < layers; i++) stages += stages_of(forms[i], latent);
    return stages * Team::counters(threads);
}

// A weight's memory, and its scales if it is quantised.
struct Weight {
    const void* data;
    const float* scales = nullptr;
};

// x[tokens, hidden], a part of it on each rank, summed; `round` goes on.
template <class E>
void sum(const Step& s, void* x, uint32_t& round, Team& team) {
    const int64_t size = s.tokens * s.hidden;
    if (!s.ranks) return;
    all_reduce(Reduce{s.ranks, x, size, round}, team, E());
    round += (uint32_t)rounds_of(s.ranks, size * sizeof(E));
}

// One after the other, for the threads of a team.
template <class E>
struct Parts {
    const LayerTensors& w;
    const LayerForm& form;
    const Step& s;
    const int64_t number;  // of the layer
    Team& team;
    const int64_t T = s.tokens, H = s.hidden;
    const int64_t *slots = form.window ? s.window_slots : s.slots;
    const int32_t* pages = form.window ? s.window_pages : s.pages;
    const float scale = form.scale != 0.0f ? form.scale : s.scale;
    const int64_t pages_row = form.window ? s.window_pages_row : s.pages_row;

    // of x[rows, inputs] with a weight and a bias.
    Linear product_of(const void* x, int64_t x_row, int64_t inputs, Weight weight, const void* bias, void* y, int64_t outputs,
                      int64_t rows) const {
        const int64_t values = s.numbers ? VALUES<int4> : VALUES<int8>;
        Linear a = {x, x_row * (int64_t)sizeof(E), weight.data, bias, y, outputs, rows, outputs, inputs / VALUES<E>};
        if (weight.scales) a.words = inputs / values, a.scales = weight.scales, a.scale_words = s.scale_columns / values, a.narrow = s.narrow;
        if (weight.scales) a.numbers = s.numbers;
        return a;
    }
    void product(const void* x, int64_t inputs, Weight weight, const void* bias, void* y, int64_t outputs) const {
        linear(product_of(x, inputs, inputs, weight, bias, y, outputs, T), team, E());
    }

    // Adds to y what the adapters change of the product of x: B of each part, `outputs` wide, one beside the other.
    struct Part {
        const void* b;
        int64_t outputs;
    };
    template <size_t N>
    void adapt(const void* x, int64_t inputs, const void* a, const Part (&parts)[N], void* y, int64_t y_row) const {
        if (!a) return;
        const int64_t rank = s.adapter_rank, width = (int64_t)N * rank, n = s.adapter_rows;
        const Groups groups = {s.adapter_slots, s.adapter_starts, &s.adapter_count};
        gather_pairs({x, s.adapter_tokens, s.adapter_x, n, inputs * (int64_t)sizeof(E)}, team);
        grouped_linear(product_of(s.adapter_x, inputs, inputs, {a}, nullptr, s.adapter_shrunk, width, n), groups, team, E());
        int64_t begin = 0;
        for (size_t i = 0; i < N; begin += parts[i++].outputs) {
            Linear expand = product_of((const E*)s.adapter_shrunk + i * rank, width, rank, {parts[i].b}, nullptr,
                                       (E*)s.adapter_change + begin, parts[i].outputs, n);
            expand.y_stride = y_row;
            grouped_linear(expand, groups, team, E());
        }
        add_rows({s.adapter_change, s.adapter_tokens, y, n, y_row}, team, E());
    }

    void norm(const void* x, void* residual, const void* weight, void* out) const {
        rms_norm({x, H, residual, H, weight, out, H, T, H, s.eps, s.from_one != 0}, team, E());
    }

    // s.x to s.x.
    void attend() const {
        const int64_t D = s.head_size, q = s.heads * D, q_head = s.head_gates ? 2 * D : D, qkv = s.heads * q_head + 2 * s.kv_heads * D;
        const Rope rope = {s.qkv, qkv, q_head, s.heads, s.kv_heads, D, s.rotated, w.q_norm, w.k_norm, s.head_eps, s.from_one != 0,
                           w.cos, w.sin, s.angles_row, s.positions, slots, w.keys, w.values, s.qkv, qkv, T};
        Linear heads = product_of(s.x, H, H, {w.qkv, w.qkv_scales}, w.qkv_bias, s.qkv, qkv, T);
        heads.rope = w.qkv_a ? nullptr : &rope;
        linear(heads, team, E());
        adapt(s.x, H, w.qkv_a, {{w.q_b, q}, {w.k_b, s.kv_heads * D}, {w.v_b, s.kv_heads * D}}, s.qkv, qkv);
        if (w.qkv_a) rope_store(rope, team, E());
        attention({s.qkv, qkv, q_head, w.keys, w.values, s.kv_heads, s.heads / s.kv_heads, D, D, 1, D, pages, pages_row, s.tasks,
                   s.num_tasks, {form.window, scale, form.softcap, w.sinks}, s.attended, q, s.scratch, s.thread_floats}, team, E());
        if (s.head_gates) gate_heads({s.attended, (const E*)s.qkv + D, qkv, q_head, T, s.heads, D}, team, E());
        product(s.attended, q, {w.o, w.o_scales}, w.o_bias, s.x, H);
        adapt(s.attended, q, w.o_a, {{w.o_b, H}}, s.x, H);
    }

    // The same over latents, its up-projections absorbed: layers/mla.py. A head has `head_size` elements of query, the last
    // `rotated` of them rotated.
    void attend_latents() const {
        const int64_t D = s.head_size, width = s.latent + s.rotated, q_width = s.heads * D, heads = s.heads;
        const int64_t down = (s.q_rank ? s.q_rank : q_width) + width, V = s.value_size;
        product(s.x, H, {w.qkv, w.qkv_scales}, w.qkv_bias, s.qkv, down);
        const void* q = s.qkv;
        int64_t q_token = down;
        if (s.q_rank) {
            rms_norm({s.qkv, down, nullptr, 0, w.q_norm, s.q, s.q_rank, T, s.q_rank, s.head_eps, false}, team, E());
            product(s.q, s.q_rank, {w.q_up, w.q_up_scales}, nullptr, s.q_up, q_width);
            q = s.q_up, q_token = q_width;
        }
        Linear absorb = product_of(q, q_token, s.nope, {w.w_kc}, nullptr, s.queries, s.latent, T);
        absorb.y_stride = heads * width;
        batched_linear(absorb, {heads, D * (int64_t)sizeof(E), width}, team, E());
        const E* kv = (const E*)s.qkv + down - width;
        rotate_latents({(const E*)q + s.nope, q_token, kv, down, heads, s.nope, s.rotated, s.latent, w.k_norm, s.head_eps, s.interleaved != 0, w.cos,
                        w.sin, s.angles_row, s.positions, slots, s.queries, w.keys, T}, team, E());
        attention({s.queries, heads * width, width, w.keys, w.keys, s.parts, heads / s.parts, width, s.latent, s.parts, width, pages,
                   pages_row, s.tasks, s.num_tasks, {0, scale, 0.0f, nullptr}, s.attended, heads * s.latent, s.scratch,
                   s.thread_floats}, team, E());
        Linear raise = product_of(s.attended, heads * s.latent, s.latent, {w.w_vc}, nullptr, s.values, V, T);
        raise.y_stride = heads * V;
        batched_linear(raise, {heads, s.latent * (int64_t)sizeof(E), V}, team, E());
        product(s.values, heads * V, {w.o, w.o_scales}, w.o_bias, s.x, H);
    }

    // The same by the gated delta rule, over states instead of KV: layers/gated_delta.py.
    void step_states() const {
        product(s.x, H, {w.qkv, w.qkv_scales}, nullptr, s.qkv, s.delta.width);
        delta_step({s.delta, s.qkv, w.filters, w.log_rate, w.rate_bias, w.delta_norm, s.eps, w.keys, (float*)w.values, s.attended},
                   team, E());
        product(s.attended, s.delta.values(), {w.o, w.o_scales}, nullptr, s.x, H);
    }

    // The dense block, or what every token goes through: s.x to s.update.
    void feed_forward() const {
        const int64_t I = form.intermediate;
        const Gate gate = {s.gate_up, (const E*)s.gate_up + I, 2 * I, s.gated, I, T, I, (int)form.bend};
        Linear gate_up = product_of(s.x, H, H, {w.gate_up, w.gate_up_scales}, nullptr, s.gate_up, 2 * I, T);
        gate_up.gate = w.gate_up_a ? nullptr : &gate;
        linear(gate_up, team, E());
        adapt(s.x, H, w.gate_up_a, {{w.gate_b, I}, {w.up_b, I}}, s.gate_up, 2 * I);
        if (w.gate_up_a) gate_mul(gate, team, E());
        product(s.gated, I, {w.down, w.down_scales}, nullptr, s.update, H);
        adapt(s.gated, I, w.down_a, {{w.down_b, H}}, s.update, H);
    }

    // s.x to s.update, which it adds to where every token goes through something beside the experts.
    void experts() const {
        const int64_t I = form.expert_size, k = form.top_k;
        if (w.shared_gate) {
            product(s.x, H, {w.shared_gate, w.shared_gate_scales}, nullptr, s.gates, 1);
            sigmoid_mul({s.update, s.gates, T, H}, team, E());
        }
        const bool grouped = form.groups > 0;
        Linear logits = product_of(s.x, H, H, {w.router}, grouped ? nullptr : w.router_bias, s.logits, form.experts, T);
        logits.wide = grouped;
        linear(logits, team, E());
        route({s.logits, (int64_t*)s.ids, (float*)s.weights, w.record, form.record_row, form.record_bytes, T, form.experts, k,
               form.normalize != 0, form.groups, form.top_groups, form.sigmoid != 0, form.best_two != 0,
               grouped ? (const float*)w.router_bias : nullptr, form.route_scale}, team, E());
        int64_t *hit = (int64_t*)s.hit + number * s.groups_row, *starts = (int64_t*)s.starts + number * s.groups_row;
        int64_t* count = (int64_t*)s.count + number;
        sort_pairs({(int64_t*)s.ids, T * k, k, form.first_expert, form.held_experts, (int64_t*)s.pair_tokens, (int64_t*)s.places,
                    hit, starts, (int64_t*)s.next, count}, team);
        const int64_t pairs = starts[*count];
        gather_pairs({s.x, (int64_t*)s.pair_tokens, s.rows, pairs, H * (int64_t)sizeof(E)}, team);
        const Groups groups = {hit, starts, count};
        const Weight gate_up = {w.experts_gate_up, w.experts_gate_up_scales}, down = {w.experts_down, w.experts_down_scales};
        const Gate gate = {s.expert_gate_up, (const E*)s.expert_gate_up + I, 2 * I, s.expert_gated, I, pairs, I, (int)form.expert_bend};
        Linear gated = product_of(s.rows, H, H, gate_up, w.experts_gate_up_bias, s.expert_gate_up, 2 * I, pairs);
        gated.gate = &gate;
        grouped_linear(gated, groups, team, E());
        grouped_linear(product_of(s.expert_gated, I, I, down, w.experts_down_bias, s.rows, H, pairs), groups, team, E());
        combine({s.rows, (int64_t*)s.places, (float*)s.weights, s.update, T, k, H, form.intermediate != 0}, team, E());
    }

    // s.out to the tokens that follow; of no layer.
    void tokens(const Sampling& to) const {
        linear(product_of(s.out, H, H, {s.head, s.head_scales}, nullptr, to.logits, to.vocabulary, to.rows), team, E());
        sample(to, team, E());
    }
};

// Before the first one there is no update yet.
template <class E>
void layer(const LayerTensors& w, const LayerForm& form, const Step& s, int64_t number, uint32_t& round, Team& team) {
    const Parts<E> parts = {w, form, s, number, team};
    const bool first = number == 0;
    parts.norm(first ? s.residual : s.update, first ? nullptr : s.residual, w.input_norm, s.x);
    form.has_states ? parts.step_states() : s.latent ? parts.attend_latents() : parts.attend();
    sum<E>(s, s.x, round, team);
    if (w.behind_attention) parts.norm(s.x, nullptr, w.behind_attention, s.x);
    parts.norm(s.x, s.residual, w.mlp_norm, s.x);
    if (form.intermediate) parts.feed_forward();
    if (form.experts) parts.experts();
    sum<E>(s, s.update, round, team);
    if (w.behind_mlp) parts.norm(s.update, nullptr, w.behind_mlp, s.update);
}

// 0, and nothing done, where a token is beyond the vocabulary, else 1.
template <class E>
int decoder(const LayerTensors* layers, const LayerForm* forms, int64_t count, const Step& step, Counter* counters, int threads) {
    for (int64_t i = 0; step.token_ids && i < step.tokens; i++)
        if (step.token_ids[i] < 0 || step.token_ids[i] >= step.vocabulary) return 0;
    const int64_t rounds = rounds_of(step.ranks, step.tokens * step.hidden * sizeof(E));
    std::memset(counters, 0, counters_of(forms, count, step.latent != 0, step.adapter_rows > 0, rounds, threads) * sizeof(Counter));
    const uint32_t before = step.ranks ? step.ranks->round : 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Team team(omp_get_thread_num(), omp_get_num_threads(), counters);
        uint32_t round = before + 1;
        const Step& s = step;
        const PairRows embeddings = {s.embeddings, s.token_ids, s.residual, s.tokens, s.hidden * (int64_t)sizeof(E)};
        if (s.token_ids) s.embeddings_packed ? gather_packed(embeddings, team) : gather_pairs(embeddings, team);
        for (int64_t i = 0; i < count; i++) layer<E>(layers[i], forms[i], s, i, round, team);
        last_norm({s.residual, s.update, s.sampled, s.last_norm, s.out, s.num_sampled, s.hidden, s.eps, s.from_one != 0}, team, E());
        if (s.sampling) Parts<E>{layers[0], forms[0], s, 0, team}.tokens(*s.sampling);
    }
    if (step.ranks) step.ranks->round = before + (uint32_t)(count * SUMS * rounds);
    return 1;
}

}  // namespace

// Bytes of counters that a call needs, from a multiple of 64 on; `rounds` are those of one sum over the ranks.
CAESURA_API int64_t caesura_decoder_counters(const void* forms, int64_t layers, int latent, int adapts, int64_t rounds, int threads) {
    return counters_of((const LayerForm*)forms, layers, latent != 0, adapts != 0, rounds, threads) * sizeof(Counter);
}

#define CAESURA_DECODER(NAME, E)                                                                                        \
    CAESURA_API int caesura_decoder_##NAME(const void* layers, const void* forms, int64_t count, const void* step,      \
                                           void* counters, int threads) {                                               \
        return decoder<E>((const LayerTensors*)layers, (const LayerForm*)forms, count, *(const Step*)step,              \
                          (Counter*)counters, threads);                                                                 \
    }
CAESURA_EACH_TYPE(CAESURA_DECODER)
