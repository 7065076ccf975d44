// The operations that decoder.cpp puts together. Strides are in elements unless stated otherwise; the last argument selects the
// element type.
#pragma once

#include "team.h"

namespace caesura {

// A gate's nonlinearity, as numbered in kernels/elementwise.py. CLAMPED: values are cut at +-7 (those of the gate above only),
// the gate is gate * sigmoid(1.702 gate), and 1 is added to what it multiplies (gpt-oss).
enum Bend : int { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

struct Gate {
    const void *gate, *up;  // `size` elements of a row each
    int64_t row;
    void* out;
    int64_t out_row, rows, size;
    int bend;
};

struct Rope {
    const void* qkv;  // a token: query heads, key heads, value heads, `size` each; query heads are `q_head` apart
    int64_t qkv_token, q_head, heads, kv_heads, size, rotated;  // the first elements of a head are rotated
    const void *q_weight, *k_weight;  // nullptr: queries and keys are not normalised
    float eps;
    bool from_one;
    const void *cos, *sin;  // a row: rotated / 2
    int64_t angles_row;
    const int64_t* positions;  // of a token: its row of angles; nullptr: they lie as tokens do
    const int64_t* slots;
    void *keys, *values;  // [page, kv head, 16, size]
    void* q;  // heads as far apart as in qkv
    int64_t q_token, tokens;
};

// y[rows, outputs] = x[rows, words] @ w[outputs, words]^T + bias: linear.cpp, which describes the weight.
struct Linear {
    const void* x;
    int64_t x_stride;  // bytes
    const void* weight;
    const void* bias;  // nullptr: none
    void* y;
    int64_t y_stride;
    int64_t rows, outputs, words;  // of the weight's rows
    bool wide = false;  // y is float, whatever x is; no bias then
    // nullptr: the weight is of x's type. Else it is fp8 (or int8), a word of it four elements (or eight), and every `scale_words` of them
    // have a line of scales: one for each output, padded to whole panels.
    const float* scales = nullptr;
    int64_t scale_words = 0;
    // Not nullptr: the weight is int8 instead, and here is room for the rows of x in 8 bits (linear_int8.h).
    void* narrow = nullptr;
    // Not nullptr: an element is four bits instead, the number of one of these sixteen.
    const int8_t* numbers = nullptr;
    // Not nullptr: what follows, while outputs are still in a cache. Those of a gate may then be missing from y.
    const Gate* gate = nullptr;
    const Rope* rope = nullptr;  // not of groups
};

constexpr int64_t INT8_COLUMNS = 128, INT4_COLUMNS = 32;  // that share a scale

// A row of x in 8 bits: a scale and a start of sums for each block, then the numbers, both in whole lines.
struct NarrowBlock {
    float scale;
    int32_t start;
};
inline int64_t narrow_head(int64_t inputs) {
    return round_up((inputs + INT4_COLUMNS - 1) / INT4_COLUMNS * (int64_t)sizeof(NarrowBlock), 64);
}
// kernels/linear.py has the same.
inline int64_t narrow_row_bytes(int64_t inputs) { return narrow_head(inputs) + round_up(inputs, 64); }

// Rows sorted by the weight that they are multiplied by: rows [starts[g], starts[g + 1]) and weight experts[g], for each g below
// *count, which stay as they are until every thread has passed the stage (team.h). Weights lie one after the other, each in whole
// panels, and so do their scales and biases.
struct Groups {
    const int64_t *experts, *starts, *count;
};

// Products of one size, each of its own rows and weight: how far it is from one to the next. Weights lie as in groups.
struct Batch {
    int64_t count, x_bytes, y_elements;
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

// `tokens` query tokens from number `token` of the step on, of the request in row `row` of the page table; the first of
// them stands at `position`. `count` tasks from this one on, of one token each, attend to their first `shared` positions
// together: a multiple of 64, in the same pages. 0: one before this one computes it.
struct Task {
    int64_t row, token, tokens, position, count, shared;

    int64_t end() const { return position + tokens; }
};

// A layer's window and the scaling of its scores.
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
    // That many of these heads share a stored one, so that threads can divide it. From a position's value to the next: `value_row`.
    int64_t parts, value_row;
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

// Rotation, and one norm, of latent attention (elementwise.cpp). A token's q is `heads` times `rope` elements with `nope` others
// between them, its kv `latent`, then `rope`. The normalised and rotated kv is contiguous in the token's cell; rotated q goes behind the `latent`
// first elements of each head's query, which a product writes.
struct Latents {
    const void* q;
    int64_t q_token;
    const void* kv;
    int64_t kv_token, heads, nope, rope, latent;
    const void* norm;
    float eps;
    bool interleaved;  // rotated pairs are neighbours
    const void *cos, *sin;  // a row: rope / 2
    int64_t angles_row;
    const int64_t *positions, *slots;  // nullptr: angles, or cells, lie as tokens do
    void *queries, *cells;
    int64_t tokens;
};

// The choice of a token's k experts (experts.cpp). `groups` of neighbouring experts, of which `top_groups` are chosen from; 0: there
// are no groups, logits are of the model's type and scores are softmax.
struct Route {
    const void* logits;  // [tokens, experts]; float with groups
    int64_t* ids;        // [tokens, k]
    float* weights;      // [tokens, k]
    void* record;        // ids once more, in rows that far apart, of 1 or 2 bytes each; nullptr: nowhere
    int64_t record_row, record_bytes;
    int64_t tokens, experts, k;
    bool normalize;
    int64_t groups, top_groups;
    bool sigmoid, best_two;  // scores are sigmoid; a group is as good as the sum of its best two
    const float* bias;       // added to scores for the choice alone; nullptr: none
    float scale;             // of weights, with groups
};

constexpr int64_t MAX_GROUPS = 64;

// Pairs of a token and one of its k experts, sorted by expert: kernels/experts.py describes the results. Only pairs of the
// `experts` from number `first` on, which this process holds, have a place; their number is starts[*count].
struct Sorting {
    const int64_t* ids;  // [pairs]
    int64_t pairs, k, first, experts;
    int64_t *tokens, *places, *hit, *starts, *next, *count;
};

// out[pair] = x[tokens[pair]], rows of that many bytes.
struct PairRows {
    const void* x;
    const int64_t* tokens;
    void* out;
    int64_t pairs, bytes;
};

// out[token] = sum of weights times rows of y, + out[token] if `adds`.
struct Combine {
    const void* y;          // [pairs, size], sorted
    const int64_t* places;  // [tokens, k]: rows of y; -1: none
    const float* weights;   // [tokens, k]
    void* out;              // [tokens, size]
    int64_t tokens, k, size;
    bool adds;
};

// x[row] *= sigmoid(gate[row])
struct Sigmoid {
    void* x;
    const void* gate;
    int64_t rows, size;
};

// x[row, head, size] *= sigmoid(gates), which are strided; x is contiguous.
struct HeadGates {
    void* x;
    const void* gates;
    int64_t gates_row, gates_head, rows, heads, size;
};

// y[tokens[row]] += x[row], each token once; rows of `size` elements.
struct AddRows {
    const void* x;
    const int64_t* tokens;
    void* y;
    int64_t rows, size;
};

// Offset in a row of a part of the first key head, and the distance to the same part of the next head.
struct Place {
    int64_t first, step;
};

// Neighbouring tokens of one sequence, and the rows of states that they begin from (NO_STATE: nothing), end in, and are copied to then
// (NO_STATE: nowhere).
struct Segment {
    int64_t first, tokens, source, target, kept;
};
constexpr int64_t NO_STATE = -1;

// Sizes of a layer with states, and the states that a step's tokens go through: delta.cpp. In the order of kernels/native.py.
struct DeltaArguments {
    const Place* places;  // in a row of the layer's first product, `width` elements: queries, keys, values, gates, b, a
    const Segment* segments;
    const int64_t* chains;  // segments [chains[c], chains[c + 1]) follow from one another
    int64_t num_chains, width, key_heads, group, key_size, value_size, kernel;

    int64_t channels() const { return key_heads * (2 * key_size + group * value_size); }
    int64_t values() const { return key_heads * group * value_size; }
};

struct Delta : DeltaArguments {
    const void* x;
    const void* filters;  // [kernel, channels]
    const void *log_rate, *rate_bias;  // [value heads]
    const void* norm;  // [value_size]
    float eps;
    void* past;  // [states, kernel - 1, channels]
    float* recurrent;  // [states, value heads, key_size, value_size]
    void* out;  // [rows, value heads, value_size]
};

// Edits of some rows' logits: execution/logit_edits.py has the definitions. The first of the edited rows have penalties. In the
// order of kernels/native.py.
struct LogitEdits {
    int64_t rows;           // of the step
    const int64_t* places;  // [rows]: among the edited ones; -1: not edited
    int64_t penalised;
    const float *repetition, *frequency, *presence;  // [penalised]
    const int64_t* counters;                         // [penalised]: rows of `counts`
    int32_t* counts;  // [counters, vocabulary]: twice how often a token stands in the output, plus one if it does in the prompt
    int64_t biases;
    const int64_t* bias_ids;  // [edited, biases]
    const float* bias;
    int64_t allowed;
    const int64_t* allowed_ids;  // [edited, allowed]: all that `restricted` rows may have
    const uint8_t* restricted;   // [edited]
};

// One token for each row of logits, with its log-probabilities: sampler.cpp. In the order of kernels/native.py.
struct Sampling {
    void* logits;
    int64_t stride, rows, vocabulary;
    const float* temperature;  // nullptr: all 1. Greedy rows do not use theirs.
    const uint8_t* greedy;
    const double* uniforms;
    int64_t* tokens;
    float* logprobs;
    float* raw_logprobs;      // nullptr: not wanted
    float* sampled_logprobs;  // nullptr: not wanted. Of the kept tokens' distribution; 0 for greedy rows
    const int64_t* top_k;     // nullptr: no row is filtered
    const float* top_p;       // as top_k
    const float* min_p;       // nullptr: all 0
    int64_t* last_kept;       // nullptr: not wanted. The last token in descending order that the filters keep; -1: all are kept
    const int64_t* given;     // nullptr: all are drawn. The row's token instead of one that is drawn; -1: none
    const LogitEdits* edits;  // nullptr: no row is edited
    double* workspace;        // caesura_sample_workspace() for each thread
};

// The log-probabilities of some rows' likeliest tokens, and of further ones: sampler.cpp. In the order of kernels/native.py.
struct FurtherLogprobs {
    const void* logits;
    int64_t stride, vocabulary, count;
    const int64_t* rows;       // [count], of the logits
    const float* temperature;  // [count]
    int64_t top;
    int32_t* top_ids;  // [count, top], descending
    float* top_logprobs;
    int64_t others;
    const int64_t* ids;  // [count, others]
    float* logprobs;
    const int64_t* last_kept;  // [count], as of Sampling; nullptr: not wanted
    uint8_t* kept;             // [count, vocabulary]: 1 for each token that the filters keep
    double* workspace;         // as that of Sampling
};

constexpr int MAX_RANKS = 64;

// Reasons why a collective does not end.
enum Failure : int32_t { OK = 0, GONE = 1, LEFT = 2, ABORTED = 3, LATE = 4 };

// One process's view of the ranks that share a memory: collectives.cpp. In the order of kernels/collectives.py.
struct Collective {
    void* memory;
    int64_t rank, size;
    int64_t bytes;  // of a buffer: a multiple of 64
    int64_t timeout_ns;
    int32_t fd;  // of the memory
    uint32_t round, resets;
    int32_t failure, lost;
};

// Elements [begin, end) of x[size], contiguous, become the sum over all ranks, in rounds from this number on.
struct Reduce {
    Collective* collective;
    void* x;
    int64_t size;
    uint32_t round;
    int64_t begin = 0, end = INT64_MAX;
};

// Returns the number of rounds that so many bytes take; 0 without ranks.
int64_t rounds_of(const Collective*, int64_t bytes);

#define CAESURA_OPERATIONS(NAME, E)             \
    void linear(const Linear&, Team&, E);       \
    void grouped_linear(const Linear&, const Groups&, Team&, E); \
    void batched_linear(const Linear&, const Batch&, Team&, E);  \
    void rotate_latents(const Latents&, Team&, E);               \
    void route(const Route&, Team&, E);         \
    void combine(const Combine&, Team&, E);     \
    void sigmoid_mul(const Sigmoid&, Team&, E); \
    void gate_heads(const HeadGates&, Team&, E); \
    void delta_step(const Delta&, Team&, E);    \
    void add_rows(const AddRows&, Team&, E);    \
    void rms_norm(const Norm&, Team&, E);       \
    void last_norm(const LastNorm&, Team&, E);  \
    void gate_mul(const Gate&, Team&, E);       \
    void gate_rows(const Gate&, int64_t first, int64_t end, E);               \
    void rope_rows(const Rope&, int64_t head, int64_t first, int64_t end, E); \
    void rope_store(const Rope&, Team&, E);     \
    void attention(const Attention&, Team&, E); \
    void sample(const Sampling&, Team&, E);     \
    void all_reduce(const Reduce&, Team&, E);
CAESURA_EACH_TYPE(CAESURA_OPERATIONS)
#undef CAESURA_OPERATIONS
void sort_pairs(const Sorting&, Team&);
void gather_pairs(const PairRows&, Team&);
void gather_packed(const PairRows&, Team&);  // x is packed as a weight: linear.cpp

// One layer's tensors in a step of decoder.cpp, in the order of kernels/decoder_layers.py; nullptr: there is none.
struct LayerTensors {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *mlp_norm;
    const void *gate_up, *down;               // of the dense block, or of what every token goes through beside its experts
    const void *behind_attention, *behind_mlp;  // norms
    const void *sinks;
    const void *q_up, *w_kc, *w_vc;           // latent attention
    const void *filters, *log_rate, *rate_bias, *delta_norm;  // of a layer with states
    const void *router, *router_bias, *experts_gate_up, *experts_gate_up_bias, *experts_down, *experts_down_bias, *shared_gate;
    // Scales of quantised weights; nullptr: the weight is of the model's type.
    const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales, *q_up_scales, *experts_gate_up_scales, *experts_down_scales,
        *shared_gate_scales;
    // Adapters of the products (layers/lora.py), all slots' one after another; nullptr: none of the step changes the product.
    const void *qkv_a, *q_b, *k_b, *v_b, *o_a, *o_b, *gate_up_a, *gate_b, *up_b, *down_a, *down_b;
    void *record, *keys, *values;  // of a layer with states: its past and recurrent ones
    const void *cos, *sin;
};

// Constants of a layer, in the order of kernels/native.py.
struct LayerForm {
    int64_t intermediate, bend;  // of the dense block, or of what every token goes through; 0: there is none
    int64_t window, has_states;  // states of the delta rule instead of KV
    int64_t experts, top_k, expert_size, expert_bend, normalize, record_row, record_bytes;  // 0 experts: there are none
    int64_t first_expert, held_experts;             // whose weights this process has
    int64_t groups, top_groups, sigmoid, best_two;  // of routing by groups
    float route_scale, scale, softcap, reserved;  // scale 0: the step's
};

// A step of decoder.cpp, in the order of kernels/native.py. Rows are contiguous: residual, update and x of `hidden` elements, qkv of all
// heads, attended of the query heads, gate_up of 2 * intermediate, gated of intermediate, out, for each of the `sampled`
// tokens, of `hidden`. Angles have a row for each position. What latents and experts need is described in kernels/decoder.py.
struct DecoderStep {
    int64_t tokens, hidden, heads, kv_heads, head_size, rotated, from_one;
    int64_t scale_columns;  // inputs that share a scale of a quantised weight
    int64_t head_gates;  // a query head is followed by gates of its output
    int64_t latent, q_rank, nope, value_size, interleaved, parts;  // latent 0: ordinary attention; q_rank 0: queries have no latent
    const int64_t* token_ids;  // of the rows of `embeddings` that become the residual; nullptr: it has been given
    const void* embeddings;    // packed as the weight of a product is, or plain
    int64_t embeddings_packed, vocabulary;
    void *residual, *update, *x, *qkv, *attended, *gate_up, *gated;
    void* narrow;            // nullptr: weights with scales are fp8, not int8
    const int8_t* numbers;  // not nullptr: codes for these
    void *q, *q_up, *queries, *values;
    void *logits, *ids, *weights, *pair_tokens, *places, *hit, *starts, *next, *count, *rows, *expert_gate_up, *expert_gated, *gates;
    int64_t groups_row;  // hit, starts and count are of each layer, that far apart
    int64_t angles_row;
    const int64_t *positions, *slots, *window_slots;
    const int32_t *pages, *window_pages;
    int64_t pages_row, window_pages_row;
    const Task* tasks;
    int64_t num_tasks;
    const int64_t* sampled;
    int64_t num_sampled;
    const void* last_norm;
    void* out;
    const void* head;  // and its scales; its product with out goes to the logits of `sampling`
    const float* head_scales;
    const Sampling* sampling;  // nullptr: the call ends with the norm
    float* scratch;
    int64_t thread_floats;
    float eps, head_eps, scale, reserved;  // scale: of the scores of layers that have none of their own
    DeltaArguments delta;
    Collective* ranks;  // nullptr: this process alone
    // The rows that have adapters, sorted by slot as pairs are by expert; change has rows as wide as the widest product.
    int64_t adapter_rank, adapter_rows, adapter_count;
    const int64_t *adapter_tokens, *adapter_slots, *adapter_starts;
    void *adapter_x, *adapter_shrunk, *adapter_change;
};

}  // namespace caesura
