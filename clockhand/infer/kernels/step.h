// The step: rows of ids through a whole model, and into its cache. This is all that Python sees (library.py).

#pragma once

#include <stdint.h>

#include "product.h"

extern "C" {

struct Norm {
    const float* weight;  // null: none
    const float* bias;    // null where there is none
};

struct Layer {
    Norm attention_norm, mlp_norm, q_norm, k_norm;
    Matrix qkv, o;
    const float* router;  // (experts, width); null where dense
    const Matrix* up;     // one for each expert, or one. For swiglu panels of gate and up alternate
    const Matrix* down;
};

struct Model {
    int32_t precision;  // of every Matrix
    int32_t vocab_size, width, layers, heads, kv_heads, head_dim, d_ff, experts, experts_per_token;
    int32_t renormalize, layer_norm, post_norm, residual, mlp /* 0 swiglu, 1 gelu, 2 relu */, interleaved, window;
    float norm_eps;
    Matrix embedding, head;
    const float* learned;  // (max_seq_len, width), or null
    Norm final_norm;
    const Layer* layer;
};

// n rows, each a token at the end of the sequence in its slot. Rows of one slot stand together, in their order.
struct Call {
    int32_t rows;
    const int32_t *ids, *slots, *positions;
    const float *cos, *sin;  // (rows, head_dim / 2), or null
    void *const *keys, *const *values;  // for each layer (slots, capacity, kv_heads, head_dim)
    int64_t capacity;
    int32_t cache_bf16;
    int32_t wanted;           // how many rows' logits, and which, in their order
    const int32_t* wanted_rows;
    float* logits;  // (wanted, vocab_size)
};

struct Workspace;
Workspace* make_workspace(void);
void free_workspace(Workspace*);

// 0, or 1 where there is no memory for it; nothing has happened then. The caller has checked every number.
int step(const Model*, const Call*, Workspace*, int32_t threads);

// Whether this processor, and its operating system, has what the library was built for.
int can_run(void);
// A digest of the source that the library was built from.
const char* source_digest(void);
// Bytes of a matrix as `pack` lays it out, without scales of int8.
int64_t packed_bytes(int32_t precision, int32_t rows, int32_t columns);
}
