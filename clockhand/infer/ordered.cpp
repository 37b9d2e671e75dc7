// y = x · Wᵀ for some rows x (rows, K) and a matrix W (N, K) in an order of its own, on processors with AVX-512.
//
// Both are fp32, or bf16 in pairs that one instruction multiplies and adds up; sums are fp32. So a step along K takes a
// word of 32 bits of each, and W lies in panels of 32 outputs (the last may have fewer), step after step:
//
//     panel 0   word 0 of outputs 0 .. 31, word 1 of outputs 0 .. 31, ...
//     panel 1   word 0 of outputs 32 .. 63, ...
//
// Up to 8 rows at a time go along a panel, with their 16 vectors of sums in registers. The first of them find it in
// memory, the others in the cache; all the while what lies in the next panel is fetched, so that multiplying hides the
// reading (LOG.md). A row's sums are to the bit the same whatever rows are beside it.

#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

static const int64_t TOGETHER = 8, OUTPUTS = 32, LINE = 64;

template <bool pairs>
static inline __m512 add_product(__m512 sum, __m512i w, __m512i x) {
    if (pairs) return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
}

template <bool pairs>
static inline void store(char* y, __mmask16 those, __m512 sum) {
    if (pairs)
        _mm256_mask_storeu_epi16(y, those, (__m256i)_mm512_cvtneps_pbh(sum));
    else
        _mm512_mask_storeu_ps(y, those, sum);
}

// `rows` of x along one panel of `outputs`. With every step, `fetch` bytes more of what lies at `next` are fetched.
template <bool pairs, int rows>
static void along(const uint32_t* x, const char* panel, char* y, int64_t outputs, int64_t steps, int64_t N,
                  const char* next, int64_t fetch) {
    const int64_t size = pairs ? 2 : 4, half = OUTPUTS / 2;
    const uint32_t every = outputs < OUTPUTS ? (1u << outputs) - 1 : ~0u;
    const __mmask16 first = every, second = every >> half;
    __m512 left[rows], right[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; step++) {
        const char* words = panel + step * outputs * 4;
        const __m512i w0 = _mm512_maskz_loadu_epi32(first, words);
        const __m512i w1 = _mm512_maskz_loadu_epi32(second, words + half * 4);
        _mm_prefetch(next + step * fetch, _MM_HINT_T1);
        if (fetch > LINE) _mm_prefetch(next + step * fetch + LINE, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512i word = _mm512_set1_epi32(x[r * steps + step]);
            left[r] = add_product<pairs>(left[r], w0, word);
            right[r] = add_product<pairs>(right[r], w1, word);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        store<pairs>(y + r * N * size, first, left[r]);
        store<pairs>(y + (r * N + half) * size, second, right[r]);
    }
}

template <bool pairs>
static void product(const uint32_t* x, const char* w, char* y, int64_t rows, int64_t N, int64_t K) {
    if (rows == 0) return;  // no turns, among which to divide a panel
    static decltype(&along<pairs, 1>) const by_rows[] = {along<pairs, 1>, along<pairs, 2>, along<pairs, 3>,
                                                         along<pairs, 4>, along<pairs, 5>, along<pairs, 6>,
                                                         along<pairs, 7>, along<pairs, 8>};
    const int64_t size = pairs ? 2 : 4, steps = K * size / 4, panel = steps * OUTPUTS * 4;
    const int64_t turns = (rows + TOGETHER - 1) / TOGETHER, fetch = OUTPUTS * 4 / turns;  // a share of the next panel
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < N; first += OUTPUTS) {
        const char* own = w + first / OUTPUTS * panel;
        const int64_t outputs = N - first < OUTPUTS ? N - first : OUTPUTS;
        for (int64_t turn = 0; turn < turns; turn++) {
            const int64_t row = turn * TOGETHER, some = rows - row < TOGETHER ? rows - row : TOGETHER;
            by_rows[some - 1](x + row * steps, own, y + (row * N + first) * size, outputs, steps, N,
                              own + panel + turn * steps * fetch, fetch);
        }
    }
}

// For Python.
extern "C" void ordered_product(const void* x, const void* w, void* y, int64_t rows, int64_t N, int64_t K, int pairs) {
    (pairs ? product<true> : product<false>)((const uint32_t*)x, (const char*)w, (char*)y, rows, N, K);
}

// For compiled graphs, by the name under which inductor calls clockhand::ordered_product.
extern "C" AOTITorchError aoti_torch_cpu_ordered_product(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* y) {
    void *from, *weights, *to;
    int64_t rows, N, K;
    int32_t dtype;
    if (aoti_torch_get_size(x, 0, &rows) || aoti_torch_get_size(w, 0, &N) || aoti_torch_get_size(w, 1, &K) ||
        aoti_torch_get_dtype(x, &dtype) || aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(w, &weights))
        return AOTI_TORCH_FAILURE;
    const int64_t sizes[] = {rows, N}, strides[] = {N, 1};
    if (aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, y) ||
        aoti_torch_get_data_ptr(*y, &to))
        return AOTI_TORCH_FAILURE;
    ordered_product(from, weights, to, rows, N, K, dtype == aoti_torch_dtype_bfloat16());
    return AOTI_TORCH_SUCCESS;
}
