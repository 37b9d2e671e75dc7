// Matrix products: a few rows of x by a matrix W (N, K) whose rows lie in panels, for each way to store W.
//
// A panel is 16 rows of W, interleaved so that one vector holds a few columns of all of them:
//
//     fp32   [K]      [16]        floats
//     bf16   [K/2]    [16][2]     bfloat16
//     int8   [K/4]    [16][4]     W + 128, unsigned: what the processors' products of bytes want
//     int4   [K/32] { [16] scales in bf16, [4] [16][4] bytes, each with columns c (low) and c + 4 (high), W + 8 }
//
// so that y[16 rows] += panel[k] · x[k] needs no sum across a vector, and memory is read in its order. For int8 and int4
// x is rounded to bytes too, with a scale for every 32 columns.
//
// Every y is summed in the order of its columns, however many rows of x there are and wherever they stand: a row gets
// the same bits whoever sits beside it.

#pragma once

#include "vectors.h"

constexpr int PANEL = 16, PARTS = PANEL / LANES;  // rows of a panel, and vectors for them
constexpr int GROUP = 32;                          // columns of x that share a scale
constexpr int MOST_ROWS = 6;                       // of x at once, in registers

enum Precision { FP32, BF16, INT8, INT4 };

struct Matrix {
    const void* data;
    const float* scale;  // int8: one a row, up to whole panels
    const float* bias;   // one a row, or null
    int32_t rows, columns;
};

// What x is before a product: a copy in the type that it is multiplied in.
struct Operand {
    char* data;      // rows of `stride` bytes
    float* scale;    // int8, int4: one a group
    int32_t* zero;   // likewise: -128 (int4: -8) · the sum of the group, since W is stored with an offset
    int64_t stride, groups;
};

#if defined(__AVX512BF16__)
constexpr bool NATIVE_BF16 = true;
#else
constexpr bool NATIVE_BF16 = false;
#endif

// Columns as they are stored: up to a whole number of what is multiplied at once. Those behind the last are zeros.
INLINE int padded_columns(int precision, int columns) {
    const int multiple = precision == FP32 ? 1 : 32;
    return (columns + multiple - 1) / multiple * multiple;
}
INLINE int64_t operand_stride(int precision, int columns) {
    const int64_t padded = padded_columns(precision, columns);
    return precision == FP32 ? 4 * padded : precision == BF16 ? (NATIVE_BF16 ? 2 : 4) * padded : padded;
}
INLINE int64_t panel_bytes(int precision, int columns) {
    const int64_t padded = padded_columns(precision, columns);
    if (precision == INT4) return padded / GROUP * (2 * PANEL + GROUP / 2 * PANEL);
    return PANEL * padded * (precision == FP32 ? 4 : precision == BF16 ? 2 : 1);
}

// One row of x into an operand.
INLINE void prepare(int precision, const float* x, int columns, const Operand& to, int64_t row) {
    char* const data = to.data + row * to.stride;
    const int padded = padded_columns(precision, columns);
    if (precision == FP32 || (precision == BF16 && !NATIVE_BF16)) {
        float* const out = (float*)data;
        memcpy(out, x, 4 * columns);
        for (int i = columns; i < padded; i++) out[i] = 0;
    } else if (precision == BF16) {
        bfloat16* const out = (bfloat16*)data;
        for (int i = 0; i < columns; i++) narrow(x[i], out[i]);
        for (int i = columns; i < padded; i++) out[i].bits = 0;
    } else {
        const int offset = precision == INT8 ? -128 : -8;
        for (int g = 0; g * GROUP < padded; g++) {
            float part[GROUP] = {};
            const int count = columns - g * GROUP < GROUP ? columns - g * GROUP : GROUP;
            for (int i = 0; i < count; i++) part[i] = x[g * GROUP + i];
            float most = 0;
            bool finite = true;
            for (int i = 0; i < GROUP; i++) {
                const float size = std::fabs(part[i]);
                most = size > most ? size : most;
                finite &= size <= 3.4e38f;
            }
            const float inverse = most > 1e-30f ? 127 / most : 0;
            int8_t* const out = (int8_t*)data + g * GROUP;
            int total = 0;
            for (int i = 0; i < GROUP; i++) {
                const float magic = 12582912.f;
                const int number = finite ? (int)((part[i] * inverse + magic) - magic) : 0;
                out[i] = (int8_t)number;
                total += number;
            }
            to.scale[row * to.groups + g] = finite ? most / 127 : NAN;  // so that it is seen
            to.zero[row * to.groups + g] = offset * total;
        }
    }
}

// ---- sums of products, for `rows` rows of x and `panels` panels ----

template <int rows, int panels>
struct Sums {
    Floats of[rows][panels * PARTS];
};

// W in floats, or what is as good as floats: two columns in one vector, the even in the low halves.
template <bool bf16, int rows, int panels>
INLINE void add_floats(Sums<rows, panels>& sums, const char* w, int64_t panel, const char* x, int64_t stride, int columns) {
    constexpr int width = panels * PARTS;
    Floats total[rows][width];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) total[r][v] = Floats{};
    const int step = bf16 ? 2 : 1;
    for (int k = 0; k < columns; k += step, w += PANEL * 4) {
        Floats even[width], odd[width];
#pragma GCC unroll 16
        for (int v = 0; v < width; v++) {
            const char* const at = w + v / PARTS * panel + v % PARTS * (4 * LANES);
            if (bf16) {
                const Bits both = load<Bits>(at);
                even[v] = (Floats)(both << 16), odd[v] = (Floats)(both & 0xffff0000u);
            } else {
                even[v] = load<Floats>(at);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const float* const numbers = (const float*)(x + r * stride) + k;
#pragma GCC unroll 16
            for (int v = 0; v < width; v++) total[r][v] += even[v] * numbers[0];
            if (bf16)
#pragma GCC unroll 16
                for (int v = 0; v < width; v++) total[r][v] += odd[v] * numbers[1];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) sums.of[r][v] = total[r][v];
}

#if defined(__AVX512BF16__)
template <int rows, int panels>
INLINE void add_bf16(Sums<rows, panels>& sums, const char* w, int64_t panel, const char* x, int64_t stride, int columns) {
    Floats total[rows][panels];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) total[r][p] = Floats{};
    for (int k = 0; k < columns; k += 2, w += PANEL * 4) {
        __m512bh numbers[panels];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) numbers[p] = (__m512bh)load<Ints>(w + p * panel);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            int both;
            memcpy(&both, x + r * stride + 2 * k, 4);
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                total[r][p] = (Floats)_mm512_dpbf16_ps((__m512)total[r][p], numbers[p], pair);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sums.of[r][p] = total[r][p];
}
#endif

// sum + the products of four unsigned bytes of W with four signed ones of x, in every lane.
INLINE Ints add_dot(Ints sum, Ints w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    // Two bytes' products fit 16 bits only if neither is above 127: so the sign of x goes to W, without its offset.
    // This has no 512-bit form of its own: as 16-bit numbers instead.
    const __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)w, 8);
    const __m512i all = _mm512_set1_epi32(x);
    const __m512i x_even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), x_odd = _mm512_srai_epi16(all, 8);
    return sum + (Ints)_mm512_madd_epi16(even, x_even) + (Ints)_mm512_madd_epi16(odd, x_odd);
#elif defined(__AVX2__)
    const __m256i even = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16((__m256i)w, 8);
    const __m256i all = _mm256_set1_epi32(x);
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), x_odd = _mm256_srai_epi16(all, 8);
    return sum + (Ints)_mm256_madd_epi16(even, x_even) + (Ints)_mm256_madd_epi16(odd, x_odd);
#else
    const Bits bytes = (Bits)w;
    for (int i = 0; i < 4; i++) sum += (Ints)(bytes >> (8 * i) & 255u) * (int32_t)(int8_t)(x >> (8 * i));
    return sum;
#endif
}

template <bool int4, int rows, int panels>
INLINE void add_bytes(Sums<rows, panels>& sums, const char* w, int64_t panel, const Operand& x, int64_t first, int columns) {
    constexpr int width = panels * PARTS;
    Floats total[rows][width];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) total[r][v] = Floats{};
    const int groups = columns / GROUP;
    for (int g = 0; g < groups; g++) {
        Ints sum[rows][width];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const int32_t zero = x.zero[(first + r) * x.groups + g];
#pragma GCC unroll 16
            for (int v = 0; v < width; v++) sum[r][v] = Ints{} + zero;
        }
        const char *numbers = w, *scales = w;
        if (int4) numbers += 2 * PANEL;
        const char* const from = x.data + first * x.stride + g * GROUP;
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k += int4 ? 8 : 4, numbers += PANEL * 4) {
            Ints low[width], high[width];
#pragma GCC unroll 16
            for (int v = 0; v < width; v++) {
                const Ints bytes = load<Ints>(numbers + v / PARTS * panel + v % PARTS * (4 * LANES));
                if (int4) {
                    low[v] = bytes & 0x0f0f0f0f, high[v] = bytes >> 4 & 0x0f0f0f0f;
                } else {
                    low[v] = bytes;
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t four[2];
                memcpy(four, from + r * x.stride + k, int4 ? 8 : 4);
#pragma GCC unroll 16
                for (int v = 0; v < width; v++) sum[r][v] = add_dot(sum[r][v], low[v], four[0]);
                if (int4)
#pragma GCC unroll 16
                    for (int v = 0; v < width; v++) sum[r][v] = add_dot(sum[r][v], high[v], four[1]);
            }
        }
        Floats scale[width];
        if (int4)
            for (int v = 0; v < width; v++)
                scale[v] = load_floats((const bfloat16*)(scales + v / PARTS * panel) + v % PARTS * LANES);
        w += int4 ? 2 * PANEL + GROUP / 2 * PANEL : GROUP * PANEL;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const float own = x.scale[(first + r) * x.groups + g];
#pragma GCC unroll 16
            for (int v = 0; v < width; v++) {
                const Floats wide = __builtin_convertvector(sum[r][v], Floats);
                total[r][v] += int4 ? wide * (scale[v] * own) : wide * own;
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++) sums.of[r][v] = total[r][v];
}

// ---- a few rows by a few panels, out[r][16 · p + i] ----

constexpr int MOST_PANELS = 4;
typedef float Out[PANEL * MOST_PANELS];

template <Precision precision, int rows, int panels>
static void few(const char* w, int64_t panel, const float* scale, const Operand& x, int64_t first, int columns, Out* out) {
    // As many panels at once as there are registers for their sums.
    constexpr int sums_each = precision >= INT8 && rows > 1 ? 2 : 1;
    constexpr int room = REGISTERS * 3 / 4 / (rows * PARTS * sums_each);
    constexpr int together = room >= panels ? panels : room >= 2 && panels % 2 == 0 ? 2 : 1;
    for (int p = 0; p < panels; p += together, w += together * panel) {
        Sums<rows, together> sums;
        const char* const from = x.data + first * x.stride;
        if (precision == FP32) add_floats<false>(sums, w, panel, from, x.stride, columns);
#if defined(__AVX512BF16__)
        if (precision == BF16) add_bf16(sums, w, panel, from, x.stride, columns);
#else
        if (precision == BF16) add_floats<true>(sums, w, panel, from, x.stride, columns);
#endif
        if (precision == INT8) add_bytes<false>(sums, w, panel, x, first, columns);
        if (precision == INT4) add_bytes<true>(sums, w, panel, x, first, columns);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < together * PARTS; v++) {
                const int at = p * PANEL + v * LANES;
                Floats y = sums.of[r][v];
                if (precision == INT8) y *= load<Floats>(scale + at);
                store(out[r] + at, y);
            }
    }
}

template <Precision precision, int panels>
static void some(int rows, const char* w, int64_t panel, const float* scale, const Operand& x, int64_t first, int columns,
                 Out* out) {
    switch (rows) {
        case 1: return few<precision, 1, panels>(w, panel, scale, x, first, columns, out);
        case 2: return few<precision, 2, panels>(w, panel, scale, x, first, columns, out);
        case 3: return few<precision, 3, panels>(w, panel, scale, x, first, columns, out);
        case 4: return few<precision, 4, panels>(w, panel, scale, x, first, columns, out);
        case 5: return few<precision, 5, panels>(w, panel, scale, x, first, columns, out);
        default: return few<precision, 6, panels>(w, panel, scale, x, first, columns, out);
    }
}

template <Precision precision>
static void forget_tiles() {
#if defined(__AMX_BF16__)
    if (precision == BF16) _tile_release();
#endif
}

#if defined(__AMX_BF16__)
// Up to 32 rows by 2 panels, in tiles of 16 by 16. x has rows of zeros or of anything up to the next 16.
constexpr int TILE = 16;

template <Precision precision>
static void set_tiles() {
    if (precision != BF16) return;
    struct {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    _tile_loadconfig(&shapes);
}

template <bool both>
static void tiles(const char* w, int64_t panel, int panels, const char* x, int64_t stride, int columns, Out* out) {
    const char* const second = panels > 1 ? w + panel : w;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < columns; k += 32) {
        _tile_loadd(4, x + 2 * k, stride);
        if (both) {
            _tile_loadd(5, x + TILE * stride + 2 * k, stride);
        }
        _tile_loadd(6, w + k * PANEL * 2, 64);
        _tile_loadd(7, second + k * PANEL * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out[0], sizeof(Out));
    _tile_stored(1, out[0] + PANEL, sizeof(Out));
    if (both) {
        _tile_stored(2, out[TILE], sizeof(Out));
        _tile_stored(3, out[TILE] + PANEL, sizeof(Out));
    }
}
#endif

#if !defined(__AMX_BF16__)
template <Precision>
static void set_tiles() {}
#endif

// ---- a block: `panels` panels by all rows ----

// emit(row, panel, panels, y): y has 16 numbers for each of `panels` panels from `panel` on. `panels` is up to 4, and
// even but for the last of a matrix.
template <Precision precision, class Emit>
static void block(const Matrix& matrix, int panel, int panels, const Operand& x, int64_t first, int rows, Emit&& emit) {
    const int columns = padded_columns(precision, matrix.columns);
    const int64_t bytes = panel_bytes(precision, matrix.columns);
    const char* const w = (const char*)matrix.data + panel * bytes;
    const float* const scale = precision == INT8 ? matrix.scale + panel * PANEL : nullptr;
#if defined(__AMX_BF16__)
    if (precision == BF16) {
        alignas(64) Out out[2 * TILE];
        for (int r = 0; r < rows; r += 2 * TILE) {
            const int count = rows - r < 2 * TILE ? rows - r : 2 * TILE;
            for (int p = 0; p < panels; p += 2) {
                const int two = panels - p < 2 ? 1 : 2;
                const char* const from = x.data + (first + r) * x.stride;
                (count > TILE ? tiles<true> : tiles<false>)(w + p * bytes, bytes, two, from, x.stride, columns, out);
                for (int i = 0; i < count; i++) emit(first + r + i, panel + p, two, out[i]);
            }
        }
        return;
    }
#endif
    alignas(64) Out out[MOST_ROWS];
    const int turns = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int turn = 0, r = 0; turn < turns; turn++) {
        const int count = (rows - r + turns - turn - 1) / (turns - turn);
        if (panels == 4) {
            some<precision, 4>(count, w, bytes, scale, x, first + r, columns, out);
        } else {  // 1 to 3
            int p = 0;
            for (; p + 2 <= panels; p += 2)
                some<precision, 2>(count, w + p * bytes, bytes, scale ? scale + p * PANEL : scale, x, first + r, columns,
                                   (Out*)(out[0] + p * PANEL));
            for (; p < panels; p++)
                some<precision, 1>(count, w + p * bytes, bytes, scale ? scale + p * PANEL : scale, x, first + r, columns,
                                   (Out*)(out[0] + p * PANEL));
        }
        for (int i = 0; i < count; i++) emit(first + r + i, panel, panels, out[i]);
        r += count;
    }
}
