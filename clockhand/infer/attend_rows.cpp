// Each of n rows looks over what its slot of the cache holds, on processors with AVX-512, in one pass of the threads.
//
//     q (n, H, Dh), keys and values (slots, capacity, K, Dh) in fp32 or bf16; seen (n, S) fp32: 0, or -inf
//     out[r, h] = Σₛ softmax(q[r, h] · keys[slots[r], s] / √Dh + seen[r, s]) · values[slots[r], s]
//
// A thread takes a row and a kv head, with up to 4 of its query heads at a time, so that each key and value is read and
// widened to fp32 once for all of them. What lies beyond the last place that a row sees is not read.

#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cmath>
#include <vector>

static const int64_t TOGETHER = 4, LANES = 16, VECTORS = 4, WIDTH = VECTORS * LANES, LINE = 64;
static const int64_t AHEAD = 8;  // places: so far ahead keys are fetched

template <bool bf16>
static inline __m512 load(const char* from, __mmask16 those) {
    if (!bf16) return _mm512_maskz_loadu_ps(those, from);
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(those, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

template <bool bf16>
static inline void store(char* to, __mmask16 those, __m512 x) {
    if (bf16)
        _mm256_mask_storeu_epi16(to, those, (__m256i)_mm512_cvtneps_pbh(x));
    else
        _mm512_mask_storeu_ps(to, those, x);
}

// exp(x) for x ≤ 0, to 2 units of the last bit: 2^n · e^r with |r| ≤ ln 2 / 2, and for e^r its series. NaN stays NaN.
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.f), x);  // of a number and NaN the second is taken
    const __m512 n = _mm512_roundscale_ps(x * 1.44269504f, 0);
    const __m512 r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    __m512 sum = _mm512_set1_ps(1 / 5040.f);
    for (float term : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 1 / 2.f, 1.f, 1.f}) sum = sum * r + term;
    return _mm512_scalef_ps(sum, n);
}

static inline __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : left > 0 ? (1 << left) - 1 : 0; }

struct Sizes {
    int64_t heads, kv_heads, head_dim, capacity, places;
};

// `heads` queries over `places` keys and values, which lie `stride` bytes apart; `scores` has room for `heads` rows.
template <bool bf16, int heads>
static void look(const char* q, const char* keys, const char* values, const float* seen, char* out, int64_t head_dim,
                 int64_t places, int64_t stride, float* scores) {
    const int64_t size = bf16 ? 2 : 4, row = (places + LANES - 1) / LANES * LANES;
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt((float)head_dim));
    for (int64_t begin = 0; begin < head_dim; begin += WIDTH) {
        __mmask16 those[VECTORS];
        __m512 query[heads][VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            those[v] = lanes(head_dim - begin - v * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                query[h][v] = scale * load<bf16>(q + (h * head_dim + begin + v * LANES) * size, those[v]);
        }
        for (int64_t s = 0; s < places; s++) {
            const char *key = keys + s * stride + begin * size, *value = values + s * stride + begin * size;
            for (int64_t line = 0; line < WIDTH * size; line += LINE) {
                _mm_prefetch(key + AHEAD * stride + line, _MM_HINT_T0);
                _mm_prefetch(value + line, _MM_HINT_T1);  // for the second half of the work
            }
            __m512 sum[heads];
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const __m512 numbers = load<bf16>(key + v * LANES * size, those[v]);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) sum[h] += numbers * query[h][v];
            }
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                float* score = scores + h * row + s;
                *score = _mm512_reduce_add_ps(sum[h]) + (begin == 0 ? seen[s] : *score);
            }
        }
    }
    float share[heads];
    for (int h = 0; h < heads; h++) {
        float* own = scores + h * row;
        __m512 peak = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int64_t s = places; s < row; s++) own[s] = -INFINITY;
        for (int64_t s = 0; s < row; s += LANES) peak = _mm512_max_ps(peak, _mm512_loadu_ps(own + s));
        peak = _mm512_set1_ps(_mm512_reduce_max_ps(peak));
        for (int64_t s = 0; s < row; s += LANES) {
            const __m512 weight = exponential(_mm512_loadu_ps(own + s) - peak);
            _mm512_storeu_ps(own + s, weight);
            total += weight;
        }
        share[h] = 1 / _mm512_reduce_add_ps(total);
    }
    for (int64_t begin = 0; begin < head_dim; begin += WIDTH) {
        __mmask16 those[VECTORS];
        __m512 sum[heads][VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            those[v] = lanes(head_dim - begin - v * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) sum[h][v] = _mm512_setzero_ps();
        }
        for (int64_t s = 0; s < places; s++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const __m512 value = load<bf16>(values + s * stride + (begin + v * LANES) * size, those[v]);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++) sum[h][v] += value * scores[h * row + s];
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                store<bf16>(out + (h * head_dim + begin + v * LANES) * size, those[v], sum[h][v] * share[h]);
    }
}

template <bool bf16>
static void attend(const char* q, const char* keys, const char* values, const int64_t* slots, const float* seen,
                   char* out, int64_t rows, Sizes sizes) {
    static decltype(&look<bf16, 1>) const by_heads[] = {look<bf16, 1>, look<bf16, 2>, look<bf16, 3>, look<bf16, 4>};
    const int64_t size = bf16 ? 2 : 4, group = sizes.heads / sizes.kv_heads, head = sizes.head_dim * size;
    const int64_t stride = sizes.kv_heads * head;
#pragma omp parallel
    {
        std::vector<float> scores(TOGETHER * (sizes.places + LANES));
#pragma omp for collapse(2) schedule(dynamic)  // rows are of unlike lengths
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < sizes.kv_heads; k++) {
                int64_t places = sizes.places;
                while (places > 1 && seen[r * sizes.places + places - 1] == -INFINITY) places--;
                const int64_t begin = slots[r] * sizes.capacity * stride + k * head;
                for (int64_t g = 0; g < group; g += TOGETHER) {
                    const int64_t some = group - g < TOGETHER ? group - g : TOGETHER;
                    const int64_t first = (r * sizes.heads + k * group + g) * head;
                    by_heads[some - 1](q + first, keys + begin, values + begin, seen + r * sizes.places, out + first,
                                       sizes.head_dim, places, stride, scores.data());
                }
            }
    }
}

// For Python.
extern "C" void attend_rows(const void* q, const void* keys, const void* values, const void* slots, const void* seen,
                            void* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                            int64_t capacity, int64_t places, int bf16) {
    (bf16 ? attend<true> : attend<false>)((const char*)q, (const char*)keys, (const char*)values,
                                          (const int64_t*)slots, (const float*)seen, (char*)out, rows,
                                          {heads, kv_heads, head_dim, capacity, places});
}

// For compiled graphs, by the name under which inductor calls clockhand::attend_rows.
extern "C" AOTITorchError aoti_torch_cpu_attend_rows(AtenTensorHandle q, AtenTensorHandle keys, AtenTensorHandle values,
                                                     AtenTensorHandle slots, AtenTensorHandle seen,
                                                     AtenTensorHandle* out) {
    void* at[6];
    int64_t *of_q, *of_keys, *of_seen;
    int32_t dtype;
    if (aoti_torch_get_sizes(q, &of_q) || aoti_torch_get_sizes(keys, &of_keys) ||
        aoti_torch_get_sizes(seen, &of_seen) || aoti_torch_get_dtype(q, &dtype))
        return AOTI_TORCH_FAILURE;
    const int64_t rows = of_q[0], heads = of_q[1], head_dim = of_q[2];
    const int64_t strides[] = {heads * head_dim, head_dim, 1};
    if (aoti_torch_empty_strided(3, of_q, strides, dtype, aoti_torch_device_type_cpu(), 0, out)) return AOTI_TORCH_FAILURE;
    const AtenTensorHandle tensors[] = {q, keys, values, slots, seen, *out};
    for (int i = 0; i < 6; i++)
        if (aoti_torch_get_data_ptr(tensors[i], &at[i])) return AOTI_TORCH_FAILURE;
    attend_rows(at[0], at[1], at[2], at[3], at[4], at[5], rows, heads, of_keys[2], head_dim, of_keys[1], of_seen[1],
                dtype == aoti_torch_dtype_bfloat16());
    return AOTI_TORCH_SUCCESS;
}
