// The operations that decoder.cpp puts together. Strides are in elements where nothing else is said; the last argument says of
// which type the elements are.
#pragma once

#include "team.h"

namespace caesura {

// y[rows, outputs] = x[rows, words] @ w[outputs, words]^T + bias: linear.cpp, which describes the weight.
struct Linear {
    const void* x;
    int64_t x_stride;  // bytes
    const void* weight;
    const void* bias;  // nullptr: none
    void* y;
    int64_t y_stride;
    int64_t rows, outputs, words;
};

struct Norm {
    const void* x;
    int64_t x_row;
    void* residual;  // nullptr: none
    int64_t residual_row;
    const void* weight;
    void* out;
    int64_t out_row, rows, size;
    float eps;
    bool from_one;  // the factor is 1 + weight, and the product is rounded once
};

// out[row] = norm(residual[t] + update[t]), t = tokens[row]. Rows are contiguous.
struct LastNorm {
    const void *residual, *update;
    const int64_t* tokens;
    const void* weight;
    void* out;
    int64_t rows, size;
    float eps;
    bool from_one;
};

// What a gate is bent by, as numbered in kernels/elementwise.py. CLAMPED: values are cut at +-7 (those of the gate above only),
// the gate is gate * sigmoid(1.702 gate), and 1 is added to what it multiplies (gpt-oss).
enum Bend : int { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

struct Gate {
    const void* gate_up;  // a row: gate, then up, `size` each
    int64_t row;
    void* out;
    int64_t out_row, rows, size;
    int bend;
};

struct Rope {
    const void* qkv;  // a token: query heads, key heads, value heads, `size` each
    int64_t qkv_token, heads, kv_heads, size, rotated;  // the first elements of a head are rotated
    const void *q_weight, *k_weight;  // nullptr: queries and keys are not normalised
    float eps;
    bool from_one;
    const void *cos, *sin;  // a row: rotated / 2
    int64_t angles_row;
    const int64_t* positions;  // of a token: its row of angles; nullptr: they lie as tokens do
    const int64_t* slots;
    void *keys, *values;  // [page, kv head, 16, size]
    void* q;
    int64_t q_token, tokens;
};

// `tokens` query tokens from number `token` of the step on, of the request in row `row` of the page table; the first of
// them stands at `position`.
struct Task {
    int64_t row, token, tokens, position;

    int64_t end() const { return position + tokens; }
};

// What a layer makes of its scores.
struct Form {
    int64_t window;  // positions that a token sees, its own included; 0: all before it
    float scale, softcap;  // scores become softcap * tanh(scale * score / softcap); 0: scale * score
    const void* sinks;  // of a query head: a score whose value is zero; nullptr: there are none

    // The first position that a token at `position` sees.
    int64_t first(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

struct Attention {
    const void* q;
    int64_t q_token, q_head;
    const void* keys;
    const void* values;
    int64_t kv_heads, group, size, value_size;
    const int32_t* pages;
    int64_t pages_row;
    const Task* tasks;
    int64_t num_tasks;
    Form form;
    void* out;
    int64_t out_token;
    float* scratch;
    int64_t thread_floats;
};

#define CAESURA_OPERATIONS(E)                   \
    void linear(const Linear&, Team&, E);       \
    void rms_norm(const Norm&, Team&, E);       \
    void last_norm(const LastNorm&, Team&, E);  \
    void gate_mul(const Gate&, Team&, E);       \
    void rope_store(const Rope&, Team&, E);     \
    void attention(const Attention&, Team&, E);
CAESURA_OPERATIONS(bf16)
CAESURA_OPERATIONS(float)
#undef CAESURA_OPERATIONS

// A step of decoder.cpp, in the order of kernels/native.py. Rows are contiguous: residual, update and x of `hidden` elements, qkv of all
// heads, attended of the query heads, gate_up of 2 * `intermediate`, gated of `intermediate`, out, for each of the `sampled`
// tokens, of `hidden`. Angles have a row for each position.
struct DecoderStep {
    int64_t tokens, hidden, heads, kv_heads, head_size, intermediate;
    void *residual, *update, *x, *qkv, *attended, *gate_up, *gated;
    const void *cos, *sin;
    int64_t angles_row;
    const int64_t *positions, *slots;
    const int32_t* pages;
    int64_t pages_row;
    const Task* tasks;
    int64_t num_tasks;
    const int64_t* sampled;
    int64_t num_sampled;
    const void* last_norm;
    void* out;
    float* scratch;
    int64_t thread_floats;
    float eps, head_eps, scale;
};

}  // namespace caesura
